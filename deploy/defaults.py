"""What is configured for whoever configures nothing: the default model, and each model's shipped drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model import shipped

MODEL = "smollm2-135m-instruct"
KIND, CHECKPOINT = "drafter.kind", "drafter.options.checkpoint"
DRAFTING: dict[str, dict[str, Any]] = {
    "smollm2-135m-instruct": {
        KIND: "dflash2",
        CHECKPOINT: "smollm2-135m-instruct-dflash2",
        "drafter.options.draft_vocabulary": 8192,
        "policy.name": "fixed:7",
    },
}
"""Model by name -> how its shipped drafter runs best."""
OTHERWISE = {KIND: "ngram"}
"""Drafts for any model, and needs no weights."""


def drafting(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration of the dotted keys `given` takes for those about drafting that it leaves out.

    A shipped drafter drafts for its model when that is called by its name, and as it runs best, unless another kind or
    another checkpoint is given.
    """
    settings = DRAFTING.get(str(given.get("model.path", MODEL)), OTHERWISE)
    if CHECKPOINT in settings and settings[CHECKPOINT] not in shipped.drafters():
        settings = OTHERWISE
    if given.get(KIND, settings[KIND]) != settings[KIND]:
        return {}
    if given.get(CHECKPOINT, settings.get(CHECKPOINT)) != settings.get(CHECKPOINT):
        return {KIND: settings[KIND]}
    return settings
