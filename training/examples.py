"""Examples, what a drafter learns from, and the folder of safetensors files that keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kadence.errors import ConfigError
from training import files
from training.conversations import Conversation

_TENSORS = ("digests", "lengths", "prompts", "tokens", "taps", "ids", "p")


@dataclass(frozen=True)
class Example:
    """One conversation of T tokens, `prompt` (P) of them the prompt, as the target sees it.

    tokens int64 [T]; taps [T, M * h_target]: outputs of M layers side by side; ids int64 and p float32 [T - P, k], best
    first: row j holds the likeliest of the target's distribution, at temperature 1, of the answer's token j.
    """

    tokens: Tensor
    prompt: int
    taps: Tensor
    ids: Tensor
    p: Tensor


@dataclass(frozen=True)
class Origin:
    """What examples were made by; those of one folder have one. Kept as the files' metadata."""

    model: str
    """The target's fingerprint."""
    taps: tuple[int, ...]
    """The tapped layers, from 0."""
    likeliest: int
    """Next tokens kept of each distribution."""

    def metadata(self) -> dict[str, str]:
        """Text by name, as safetensors files hold it."""
        return {"model": self.model, "taps": ",".join(map(str, self.taps)), "likeliest": str(self.likeliest)}


class Cache:
    """Examples in a folder of safetensors files, read one at a time.

    Raises ConfigError naming the file where one is damaged, or made by another target or other taps than the rest.
    """

    def __init__(self, folder: Path) -> None:
        self._files = [_Chunk(path) for path in sorted(folder.glob("*.safetensors"))]
        if not self._files:
            raise ConfigError(f"{folder}: no features there; `python -m training.features` makes them")
        self.metadata = next((file.metadata for file in self._files if file.metadata), {})
        """What `Origin.metadata` gave; {} where the files are of a version that did not say."""
        for file in self._files:
            file.check(self.metadata, self._files[0].width)
        self._where = [(file, index) for file in self._files for index in range(len(file.digests))]
        self.taps = tuple(map(int, self.metadata["taps"].split(","))) if "taps" in self.metadata else None
        """The tapped layers that examples have; None where the files do not say."""
        self._columns: Tensor | None = None

    def choose(self, taps: tuple[int, ...]) -> None:
        """Examples have these taps from now on, some of those they have. Raises ValueError if one is not there."""
        if self.taps is None or not set(taps) <= set(self.taps):
            raise ValueError(f"taps {taps} of {self.taps}")
        each = self.width // len(self.taps)
        had = torch.arange(self.width) if self._columns is None else self._columns
        self._columns = torch.cat([had[self.taps.index(tap) * each :][:each] for tap in taps])
        self.taps = taps

    @property
    def model(self) -> str:
        """The target's fingerprint; "" where the files do not say."""
        return self.metadata.get("model", "")

    @property
    def width(self) -> int:
        """Of the tapped outputs side by side, M * h_target."""
        return self._files[0].width if self._columns is None else len(self._columns)

    def __len__(self) -> int:
        return len(self._where)

    def digest(self, index: int) -> str:
        """Names the conversation of example `index`, 32 hex digits."""
        file, place = self._where[index]
        return file.digests[place]

    def prompt_digest(self, index: int) -> str:
        """Names the prompt of example `index`, 32 hex digits."""
        file, place = self._where[index]
        return hashlib.sha256(file.prompt(place).numpy().tobytes()).hexdigest()[:32]

    def __getitem__(self, index: int) -> Example:
        file, place = self._where[index]
        example = file.read(place)
        return example if self._columns is None else replace(example, taps=example.taps[:, self._columns])


class _Chunk:
    """One file: tensors of all its examples one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(str(path), framework="pt")
            digests, self._lengths, self._prompts = (self._file.get_tensor(name) for name in _TENSORS[:3])
            self._parts = {name: self._file.get_slice(name) for name in _TENSORS[3:]}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: damaged, or no file of features ({error})") from None
        self.digests = [bytes(row.tolist()).hex() for row in digests]
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.width: int = self._parts["taps"].get_shape()[1]
        # Where each example begins, and its answer: rows of all tokens, and of those of answers.
        self._rows = [0, *self._lengths.cumsum(0).tolist()]
        self._answers = [0, *(self._lengths - self._prompts).cumsum(0).tolist()]

    def check(self, metadata: dict[str, str], width: int) -> None:
        """Raises ConfigError if the file says something else, where it says anything, or is of another width."""
        for name, value in self.metadata.items():
            if value != metadata.get(name):
                raise ConfigError(f"{self._path}: {name} is {value}, in other files of the folder {metadata.get(name)}")
        if self.width != width:
            raise ConfigError(f"{self._path}: taps are {self.width} wide, in other files of the folder {width}")

    def prompt(self, place: int) -> Tensor:
        """Ids of the prompt of example `place`, int32 [P]."""
        start: int = self._rows[place]
        ids: Tensor = self._parts["tokens"][start : start + int(self._prompts[place])]
        return ids

    def read(self, place: int) -> Example:
        """Example `place` of the file."""
        rows, answers = (slice(ends[place], ends[place + 1]) for ends in (self._rows, self._answers))
        return Example(
            self._parts["tokens"][rows].long(),
            int(self._prompts[place]),
            self._parts["taps"][rows],
            self._parts["ids"][answers].long(),
            self._parts["p"][answers].float(),
        )


def write(
    path: Path, conversations: Sequence[Conversation], examples: Sequence[Example], origin: Origin | None = None
) -> None:
    """Stores examples, their taps in bfloat16; whoever reads the folder sees the whole file or none. Raises OSError."""
    tensors = {
        "digests": torch.tensor([list(conversation.digest) for conversation in conversations], dtype=torch.uint8),
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
        "prompts": torch.tensor([example.prompt for example in examples], dtype=torch.int32),
        "tokens": torch.cat([example.tokens for example in examples]).int(),
        "taps": torch.cat([example.taps for example in examples]).bfloat16(),
        "ids": torch.cat([example.ids for example in examples]).int(),
        "p": torch.cat([example.p for example in examples]).half(),
    }
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    files.replace(path, lambda part: save_file(stored, part, metadata=origin.metadata() if origin else None))
