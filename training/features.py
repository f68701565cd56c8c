"""What a drafter learns from, computed once: the target's tapped hidden states and its likeliest next tokens.

python -m training.features --data FILE.jsonl ... --model MODEL --taps 1,8,14,21,27 --out FOLDER

Conversations that the folder has are left out, so that a run that was stopped goes on, and data that grows is followed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kadence.errors import ConfigError
from services.kernels.candidates import candidates
from services.kernels.device import moved
from services.model.arch import read_arch
from services.model.dtypes import resolve_dtype
from services.model.fetch import resolve
from services.model.weights import Checkpoint
from services.verifier import batch
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import Target
from training.command import add_machine, ended, machine
from training.conversations import LONGEST, Conversation, read
from training.examples import Cache, Example, Origin, write

LIKELIEST = 32
"""Next tokens kept of each of the target's distributions."""
_CHUNK = 64  # conversations of one file
_PAGE = 16  # tokens
_PAGES = 72  # of one pass, about 1100 tokens

assert LONGEST <= _PAGES * _PAGE


class Placed:
    """A checkpoint whose tensors go to a device as they are taken."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `Checkpoint.take`."""
        return self._checkpoint.take(name, shape, dtype).to(self._device)


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of a folder on a device. Raises CheckpointError."""
    arch = read_arch(folder)
    with Checkpoint(folder) as checkpoint:
        target = Target.built(arch, Placed(checkpoint, device), dtype)
        target.fingerprint = checkpoint.finish(ignore=["lm_head.weight"] if arch.tied_head else [])
    return target


class Extractor:
    """The target, run over whole conversations of at most `LONGEST` tokens."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        """taps: layers from 0, ascending. Raises ConfigError if the target has no such layers."""
        if list(taps) != sorted(set(taps)) or not taps or not all(0 <= tap < target.arch.num_layers for tap in taps):
            raise ConfigError(
                f"taps are {list(taps)}; ascending layers of 0 to {target.arch.num_layers - 1} are needed"
            )
        self.origin = Origin(target.fingerprint, taps, LIKELIEST)
        self._target, self._taps = target, taps
        target.prepare(LONGEST)
        self._caches = allocate_caches(target.arch, _PAGES, _PAGE, target.dtype, target.device)
        self._kernel, self._layout = batch.attention_for(target, _PAGES, _PAGE)

    def __call__(self, conversations: Sequence[Conversation]) -> list[Example]:
        """Their examples, in order, on the host."""
        found: list[Example] = []
        for part in _passes(conversations):
            found += self._run(part)
        return found

    @torch.inference_mode()
    def _run(self, conversations: list[Conversation]) -> list[Example]:
        works, page = [], 0
        for conversation in conversations:
            tokens = [*conversation.prompt, *conversation.response]
            pages = list(range(page, page + _pages(conversation)))
            page += len(pages)
            # Rows from the prompt's last one, which gives the answer's first token, to the answer's last one.
            works.append(batch.Work(tokens, 0, len(conversation.response) + 1, pages))
        forward, order = batch.plan(works, self._layout)
        forward = moved(forward, self._target.device)
        logits, tapped = self._target.forward_tapped(forward, self._caches, self._kernel, self._taps)
        values, ids, total = (tensor.cpu() for tensor in candidates(logits, LIKELIEST))
        p = (values - total[:, None]).exp()
        taps = torch.cat(tapped, dim=-1).cpu()
        found: dict[int, Example] = {}
        row = sample = 0
        for index in order:
            work, answer = works[index], len(conversations[index].response)
            rows, samples = slice(row, row + work.rows), slice(sample, sample + answer)
            prompt = work.rows - answer
            found[index] = Example(torch.tensor(work.tokens), prompt, taps[rows], ids[samples], p[samples].float())
            row, sample = row + work.rows, sample + work.samples
        return [found[index] for index in range(len(works))]


def _pages(conversation: Conversation) -> int:
    return -(-(len(conversation.prompt) + len(conversation.response)) // _PAGE)


def _passes(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """The conversations, as many at a time as the pages hold."""
    part: list[Conversation] = []
    used = 0
    for conversation in conversations:
        if part and used + _pages(conversation) > _PAGES:
            yield part
            part, used = [], 0
        part.append(conversation)
        used += _pages(conversation)
    if part:
        yield part


def extend(folder: Path, conversations: Sequence[Conversation], extract: Extractor) -> None:
    """Adds examples of those conversations that the folder lacks; reports progress.

    Raises ConfigError if what is there was made by another target or with other taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = _digests(folder, extract.origin)
    missing = [conversation for conversation in conversations if conversation.digest.hex() not in there]
    print(f"{len(missing)} of {len(conversations)} conversations to do", flush=True)
    begun, rows = time.monotonic(), 0
    taps = extract.origin.metadata()["taps"]
    for start in range(0, len(missing), _CHUNK):
        chunk = missing[start : start + _CHUNK]
        examples = extract(chunk)
        name = hashlib.sha256(b"".join(conversation.digest for conversation in chunk) + taps.encode()).hexdigest()[:16]
        write(folder / f"{name}.safetensors", chunk, examples, extract.origin)
        rows += sum(len(example.tokens) for example in examples)
        done, gone = start + len(chunk), time.monotonic() - begun
        ahead = gone / done * (len(missing) - done) / 60
        print(f"{done} of {len(missing)}, {rows} tokens, {rows / gone:.0f}/s, {ahead:.1f} min left", flush=True)


def _digests(folder: Path, origin: Origin) -> set[str]:
    """Of the examples that the folder has. Raises ConfigError if they are not of `origin`."""
    if next(folder.glob("*.safetensors"), None) is None:
        return set()
    cache = Cache(folder)
    for name, value in origin.metadata().items():
        if cache.metadata.get(name, value) != value:
            raise ConfigError(f"{folder}: {name} of the features there is {cache.metadata[name]}, not {value}")
    return {cache.digest(index) for index in range(len(cache))}


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return ended(lambda: _make(args), "stopped; the same command goes on where it was")


def _make(args: argparse.Namespace) -> None:
    device = machine(args)
    target = load(resolve(args.model), resolve_dtype("auto", device), device)
    extract = Extractor(target, args.taps)
    longest = min(LONGEST, target.arch.max_position)
    extend(args.out, read(args.data, target.arch.vocab_size, longest), extract)


def _taps(text: str) -> tuple[int, ...]:
    return tuple(int(tap) for tap in text.split(","))


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m training.features", description=about)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="what `python -m training.data` wrote")
    add("--model", required=True, help="the target: a folder, or a name of `kadence models list`")
    add("--taps", type=_taps, required=True, help="layers whose outputs the drafter reads, from 0, as 1,8,14,21,27")
    add("--out", type=Path, required=True, help="folder of the features; about 6 kB a token with the default model")
    add_machine(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
