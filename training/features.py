"""What a drafter learns from, computed once: the target's tapped hidden states and its likeliest next tokens.

python -m training.features --data FILE.jsonl ... --model MODEL --taps 1,8,14,21,27 --out FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kadence.errors import ConfigError
from services.kernels.candidates import candidates
from services.model.fetch import resolve
from services.verifier import batch
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import Target
from training.conversations import Conversation, read

LIKELIEST = 32
"""Next tokens kept of each of the target's distributions."""
LONGEST = 512
_CHUNK = 64  # conversations of one file
_ROWS = 1024  # of one pass
_PAGE = 16


@dataclass(frozen=True)
class Example:
    """One conversation of T tokens, P of them the prompt, as the target sees it.

    tokens int64 [T]; taps [T, M * h_target]; ids int64 and p float32 [T - P, LIKELIEST]: row j is the target's
    distribution, at temperature 1, of the answer's token j.
    """

    tokens: Tensor
    prompt: int
    taps: Tensor
    ids: Tensor
    p: Tensor


class Extractor:
    """The target, run over whole conversations."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self._target, self._taps = target, taps
        pages = -(-(_ROWS + LONGEST) // _PAGE) + _ROWS
        target.prepare(LONGEST)
        self._caches = allocate_caches(target.arch, pages, _PAGE, target.dtype, target.device)
        self._kernel, self._layout = batch.attention_for(target, pages, _PAGE)

    def __call__(self, conversations: list[Conversation]) -> list[Example]:
        """Their examples, in order, in passes of about `_ROWS` rows."""
        found: list[Example] = []
        for part in _passes(conversations):
            found += self._run(part)
        return found

    @torch.inference_mode()
    def _run(self, conversations: list[Conversation]) -> list[Example]:
        works, page = [], 0
        for conversation in conversations:
            tokens = [*conversation.prompt, *conversation.response]
            pages = list(range(page, page + -(-len(tokens) // _PAGE)))
            page += len(pages)
            works.append(batch.Work(tokens, 0, len(conversation.response) + 1, pages))
        forward, order = batch.plan(works, self._layout)
        logits, tapped = self._target.forward_tapped(forward, self._caches, self._kernel, self._taps)
        values, ids, total = candidates(logits, LIKELIEST)
        p = (values - total[:, None]).exp()
        taps = torch.cat(tapped, dim=-1)
        found: dict[int, Example] = {}
        row = sample = 0
        for index in order:
            work, answer = works[index], len(conversations[index].response)
            rows, samples = slice(row, row + work.rows), slice(sample, sample + answer)
            found[index] = Example(
                torch.tensor(work.tokens), work.rows - answer, taps[rows], ids[samples], p[samples].float()
            )
            row, sample = row + work.rows, sample + work.samples
        return [found[index] for index in range(len(works))]


class Cache:
    """Examples in a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._files = [_Chunk(path) for path in sorted(folder.glob("*.safetensors"))]
        if not self._files:
            raise ConfigError(f"{folder}: no features there; `python -m training.features` makes them")
        self._where = [(file, index) for file in self._files for index in range(len(file.digests))]

    def __len__(self) -> int:
        return len(self._where)

    def digest(self, index: int) -> str:
        """Names the conversation of example `index`, 32 hex digits."""
        file, place = self._where[index]
        return file.digests[place]

    def __getitem__(self, index: int) -> Example:
        file, place = self._where[index]
        return file.read(place)


class _Chunk:
    def __init__(self, path: Path) -> None:
        self._file = safe_open(str(path), framework="pt")
        self._lengths, self._prompts = (
            self._file.get_tensor("lengths").tolist(),
            self._file.get_tensor("prompts").tolist(),
        )
        self.digests = [bytes(row.tolist()).hex() for row in self._file.get_tensor("digests")]

    def read(self, place: int) -> Example:
        start, length, prompt = sum(self._lengths[:place]), self._lengths[place], self._prompts[place]
        first = start - sum(self._prompts[:place])
        rows, answers = slice(start, start + length), slice(first, first + length - prompt)
        part = {name: self._file.get_slice(name) for name in ("tokens", "taps", "ids", "p")}
        return Example(
            part["tokens"][rows].long(),
            prompt,
            part["taps"][rows],
            part["ids"][answers].long(),
            part["p"][answers].float(),
        )


def write(path: Path, conversations: list[Conversation], examples: list[Example]) -> None:
    """Stores examples; whoever reads the folder sees the whole file or none."""
    tensors = {
        "digests": torch.tensor([list(conversation.digest) for conversation in conversations], dtype=torch.uint8),
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
        "prompts": torch.tensor([example.prompt for example in examples], dtype=torch.int32),
        "tokens": torch.cat([example.tokens for example in examples]).int(),
        "taps": torch.cat([example.taps for example in examples]),
        "ids": torch.cat([example.ids for example in examples]).int(),
        "p": torch.cat([example.p for example in examples]).half(),
    }
    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(part))
    os.replace(part, path)


def _passes(conversations: list[Conversation]) -> Iterator[list[Conversation]]:
    part: list[Conversation] = []
    rows = 0
    for conversation in conversations:
        size = len(conversation.prompt) + len(conversation.response)
        if part and rows + size > _ROWS:
            yield part
            part, rows = [], 0
        part.append(conversation)
        rows += size
    if part:
        yield part


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.features", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--taps", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = Target(resolve(args.model), "bfloat16")
    taps = tuple(int(tap) for tap in args.taps.split(","))
    extract = Extractor(target, taps)
    args.out.mkdir(parents=True, exist_ok=True)
    conversations = read(args.data, target.arch.vocab_size, LONGEST)
    chunks = [conversations[i : i + _CHUNK] for i in range(0, len(conversations), _CHUNK)]
    start, rows = time.monotonic(), 0
    for number, chunk in enumerate(chunks, 1):
        name = hashlib.sha256(b"".join(c.digest for c in chunk) + args.taps.encode()).hexdigest()[:16]
        path = args.out / f"{name}.safetensors"
        if path.exists():
            continue
        examples = extract(chunk)
        write(path, chunk, examples)
        rows += sum(len(example.tokens) for example in examples)
        gone = time.monotonic() - start
        print(f"{number}/{len(chunks)} {rows / gone:.0f} rows/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
