"""The model in training, its optimiser, and the step it is at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kadence.errors import CheckpointError, ConfigError
from services.drafter.draft_vocabulary import read_draft_vocabulary
from services.kernels.device import moved
from services.model.arch import read_arch
from services.model.dtypes import resolve_dtype
from services.model.weights import Checkpoint
from training import batches, checkpoint, files
from training.examples import Cache
from training.held_out import hits
from training.loss import head_loss, selector_loss
from training.model import DraftModel
from training.muon import Muon
from training.recipe import Recipe

_HELD_OUT = 96  # conversations that a look at held-out ones takes
_ANCHORS_SEED = 1_234_567  # where their blocks begin, in every run


class Trainer:
    """Trains on one cache. What it draws is a function of (seed, step), so that a run can be taken up anywhere."""

    def __init__(self, recipe: Recipe, target: Path, cache: Cache, ranking: Path, device: torch.device) -> None:
        """target: the model's folder. ranking: ids by frequency, see services.drafter.draft_vocabulary.

        Raises ConfigError or CheckpointError, one line.
        """
        self.recipe, self._cache, self._device, self._target = recipe, cache, device, target
        torch.manual_seed(recipe.seed)
        arch = read_arch(target)
        if cache.taps is not None and set(recipe.taps) <= set(cache.taps):
            cache.choose(recipe.taps)
        if cache.taps not in (None, recipe.taps) or cache.width != len(recipe.taps) * arch.hidden_size:
            raise ConfigError(
                f"the features are of taps {cache.taps}, {cache.width} wide; the recipe's are {recipe.taps}"
            )
        shape, self._dtype = (arch.vocab_size, arch.hidden_size), resolve_dtype("auto", device)
        with Checkpoint(target) as tensors:
            embedding = tensors.take("model.embed_tokens.weight", shape, self._dtype)
            head = embedding if arch.tied_head else tensors.take("lm_head.weight", shape, self._dtype)
            fingerprint = tensors.fingerprint(ignore=["lm_head.weight"] if arch.tied_head else [])
        if cache.model not in ("", fingerprint):
            raise ConfigError(f"the features are of the model {cache.model}; {target} is {fingerprint}")
        self.vocabulary = read_draft_vocabulary(ranking, recipe.vocabulary, arch.vocab_size)
        self._ranked = json.loads(ranking.read_text(encoding="utf-8"))["token_ids"]
        self.head = head[self.vocabulary].to(device)
        self.places = torch.full((arch.vocab_size,), -1)
        self.places[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.model = DraftModel(recipe.arch(arch), embedding.to(device), len(self.vocabulary))
        self._learn, self._held = batches.split(cache)
        if not self._learn or not self._held:
            held = (
                f"{len(self._held)} of {len(cache)} conversations are held out (about one prompt in {batches.HELD_OUT})"
            )
            raise ConfigError(
                f"{held}; some to learn from and some to hold out are needed, add features of more prompts"
            )
        self.step = 0
        self._optimizers = _optimizers(self.model, recipe, self._dtype)
        self.model.to(device)

    @property
    def examples(self) -> tuple[int, int]:
        """How many there are to train on, and held out."""
        return len(self._learn), len(self._held)

    def begin(self, init: Path | None) -> None:
        """Takes what there is of the drafter in `init`, and the rest from the target's last layers."""
        missing = list(self.model.state_dict())
        if init is not None:
            missing = checkpoint.load(self.model, init, self.vocabulary)
        checkpoint.load_target(self.model, self._target, missing)

    def advance(self) -> dict[str, float]:
        """One step; what it measured of its own batch. Raises ConfigError if it is not finite; the weights stay."""
        r = self.recipe
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * r.rate_at(self.step)
        places = batches.pick(len(self._learn), self.step, r.batch, r.seed)
        total, found = self._loss(self._batch([self._learn[place] for place in places], self.step, r.seed))
        total.backward()
        if not torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).isfinite():
            raise ConfigError(f"step {self.step}: the loss or its gradient is not finite; lower rates may help")
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1
        return found

    @torch.no_grad()
    def look(self) -> dict[str, float]:
        """On held-out examples: the loss, and the acceptance length, block by block, of walk, head and oracle."""
        blocks, sums = 0, dict.fromkeys(("loss", "walk", "unary", "oracle"), 0.0)
        for batch in self._held_batches():
            found = hits(self.model, self.head, batch)
            blocks += len(found.walk)
            sums["loss"] += self._loss(batch)[1]["loss"] * len(found.walk)
            for name, hit in (("walk", found.walk), ("unary", found.unary), ("oracle", found.inside)):
                sums[name] += float(found.lengths(hit).sum())
        return {name: value / blocks for name, value in sums.items()}

    def save(self, path: Path) -> None:
        """Writes what `load` needs; a reader sees the old file or the new. Raises OSError."""
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}
        state["recipe"] = asdict(self.recipe) | {"taps": list(self.recipe.taps)}
        files.replace(path, lambda part: torch.save(state, part))

    def load(self, path: Path) -> None:
        """Goes on where a run of the same recipe was saved. Raises CheckpointError if the file is none of such."""
        try:
            saved: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
            recipe, model, optimizers, step = (saved[key] for key in ("recipe", "model", "optimizers", "step"))
        except Exception as error:  # what a damaged file makes of torch's reader is of any type
            raise CheckpointError(f"{path}: damaged, or not a training state ({type(error).__name__})") from None
        if differs := self.recipe.differs(recipe):
            raise CheckpointError(f"{path}: another recipe: {differs}; take another folder, or that recipe")
        try:
            self.model.load_state_dict(model)
            for optimizer, state in zip(self._optimizers, optimizers, strict=True):
                optimizer.load_state_dict(state)
        except (RuntimeError, ValueError):
            raise CheckpointError(f"{path}: of a drafter for another target, {self._target} is given") from None
        self.step = step

    def export(self, folder: Path) -> None:
        """Writes the drafter in the published format."""
        checkpoint.save(self.model, folder, self.vocabulary, self._ranked)

    def _held_batches(self) -> Iterator[batches.Batch]:
        held, size = self._held[:_HELD_OUT], self.recipe.batch
        for number, start in enumerate(range(0, len(held), size)):
            yield self._batch(held[start : start + size], number, _ANCHORS_SEED)

    def _batch(self, indices: list[int], step: int, seed: int) -> batches.Batch:
        r, examples = self.recipe, [self._cache[index] for index in indices]
        anchors = batches.draw(examples, r.anchors, step, seed)
        batch = batches.assemble(examples, anchors, r.block, self.places, r.gamma, self._dtype)
        return moved(batch, self._device)

    def _loss(self, batch: batches.Batch) -> tuple[Tensor, dict[str, float]]:
        r, labels, selector = self.recipe, batch.labels, self.model.candidate_selector
        rows = self.model(batch.blocks)[:, :, 1:].reshape(-1, self.model.arch.hidden_size)
        weight = labels.weight / labels.weight.sum()
        total, scores = head_loss(
            rows, self.head, replace(labels, weight=weight), r.soft, self.model.arch.selector_top_k
        )
        found = {"head": float(total.detach())}
        if selector is not None:
            final = scores.values + selector.edges(rows, labels.before, scores.ids)
            each, place = selector_loss(final, scores.ids, labels.token)
            edge = (each * weight).sum()
            total = total + r.selector * edge
            found["selector"] = float(edge.detach())
            found["hit"] = float(((final.argmax(dim=-1) == place) * weight).sum())
        return total, found | {"loss": float(total.detach())}


def _optimizers(model: DraftModel, recipe: Recipe, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for everything else."""
    parts: dict[str, list[Tensor]] = {"muon": [], "codebooks": [], "others": []}
    for name, parameter in model.named_parameters():
        inside = recipe.muon_rate > 0 and parameter.dim() == 2 and name.startswith(("layers.", "fc."))
        parts["codebooks" if name.endswith("codebook") else "muon" if inside else "others"].append(parameter)
    groups = [{"params": parts["others"], "peak": recipe.rate}]
    if parts["codebooks"]:
        groups.append({"params": parts["codebooks"], "peak": recipe.codebook_rate})
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if parts["muon"]:
        muon = [{"params": parts["muon"], "peak": recipe.muon_rate}]
        found.append(Muon(muon, dtype))
    return found
