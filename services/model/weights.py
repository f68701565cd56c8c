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
        self._listing = self._index if self._index.exists() else folder / "model.safetensors"
        self._files: dict[str, safe_open] = {}
        self._where: dict[str, Path] = {}
        self._taken: set[str] = set()
        self._hash = hashlib.sha256((folder / "config.json").read_bytes())
        for path in self._paths():
            self._open(path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name` of `shape` as `dtype`. Raises CheckpointError naming file and tensor."""
        if name not in self._where:
            raise CheckpointError(f"{self._listing}: tensor {name} is missing")
        path = self._where[name]
        try:
            tensor = self._files[str(path)].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error})") from None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}, expected floating point")
        self._taken.add(name)
        self._update_hash(name, tensor)
        return tensor.to(dtype, copy=True)  # a view would keep the whole file mapped

    def finish(self, ignore: Iterable[str] = ()) -> str:
        """Refuses tensors nobody took, `ignore` excepted; returns the fingerprint of config, names, shapes, samples."""
        left = sorted(set(self._where) - self._taken - set(ignore))
        if left:
            raise CheckpointError(f"{self._where[left[0]]}: unexpected tensor {left[0]} ({len(left)} in all)")
        return self._hash.hexdigest()[:32]

    def _paths(self) -> list[Path]:
        if self._listing != self._index:
            return [self._listing]
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

    def _update_hash(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1)
        # Rounded up, so that the sample spans the whole tensor; odd, so that it does not walk down one column.
        stride = -(-flat.numel() * flat.element_size() // SAMPLE_BYTES) | 1
        sample = flat[::stride].contiguous().view(torch.uint8).numpy().tobytes()
        self._hash.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        self._hash.update(sample)
