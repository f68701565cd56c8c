"""Streams tensors out of safetensors files, checking every name and shape, and fingerprints what it read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kadence.errors import CheckpointError
from services.model.arch import read_json

SAMPLE_BYTES = 64 * 1024


class Checkpoint:
    """The tensors of one folder: `model.safetensors`, or the shards named by `model.safetensors.index.json`.

    Use as a context manager; every tensor must be taken once, `finish` refuses what is left over.
    """

    def __init__(self, folder: Path) -> None:
        self._index = folder / "model.safetensors.index.json"
        self.listing = self._index if self._index.exists() else folder / "model.safetensors"
        self._files: dict[str, safe_open] = {}
        self._where: dict[str, Path] = {}
        self._digests: dict[str, bytes] = {}  # of every tensor taken
        self._config = (folder / "config.json").read_bytes()
        for path in self._paths():
            self._open(path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def names(self) -> list[str]:
        """Of all tensors in the files, sorted."""
        return sorted(self._where)

    def take(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> torch.Tensor:
        """Tensor `name` of `shape` (None: any) as `dtype` (None: as stored); a copy.

        Raises CheckpointError naming file and tensor.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.listing}: tensor {name} is missing")
        tensor = self._read(name)
        path = self._where[name]
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}, expected floating point")
        self._digests[name] = _digest(name, tensor)
        return tensor.to(dtype or tensor.dtype, copy=True)  # a view would keep the whole file mapped

    def finish(self, ignore: Iterable[str] = ()) -> str:
        """Refuses tensors nobody took, `ignore` excepted; returns the fingerprint of config, names, shapes, samples.

        The order in which tensors were taken does not matter.
        """
        left = sorted(set(self._where) - set(self._digests) - set(ignore))
        if left:
            raise CheckpointError(f"{self._where[left[0]]}: unexpected tensor {left[0]} ({len(left)} in all)")
        whole = hashlib.sha256(self._config)
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return whole.hexdigest()[:32]

    def fingerprint(self, ignore: Iterable[str] = ()) -> str:
        """What `finish` would return had all tensors been taken, `ignore` excepted."""
        for name in set(self._where) - set(self._digests) - set(ignore):
            self._digests[name] = _digest(name, self._read(name))
        return self.finish(ignore)

    def _read(self, name: str) -> torch.Tensor:
        """A tensor mapped from its file."""
        path = self._where[name]
        try:
            return self._files[str(path)].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error})") from None

    def _paths(self) -> list[Path]:
        if self.listing != self._index:
            return [self.listing]
        weight_map = read_json(self._index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self._index}: weight_map is missing")
        odd = [name for name in weight_map.values() if not isinstance(name, str)]
        if odd:
            raise CheckpointError(f"{self._index}: weight_map names {odd[0]!r}, expected file names")
        return [self._index.parent / name for name in sorted(set(weight_map.values()))]

    def _open(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path}: no such file")
        try:
            file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or not a safetensors file ({error})") from None
        self._files[str(path)] = file
        for name in file.keys():  # noqa: SIM118 - not a dict
            self._where[name] = path


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    """Of name, shape, dtype, and a sample of the values."""
    flat = tensor.reshape(-1)
    # Rounded up, so that the sample spans the whole tensor; odd, so that it does not walk down one column.
    stride = -(-flat.numel() * flat.element_size() // SAMPLE_BYTES) | 1
    sample = flat[::stride].contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{name}{list(tensor.shape)}{tensor.dtype}".encode() + sample).digest()
