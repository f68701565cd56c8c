"""Sampling options to be put to the test: each alone, and random combinations of them, always the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Options = dict[str, Any]
_PLAIN = {"temperature", "top_p", "seed", "max_tokens", "max_draft_tokens", "logprobs", "n", "ignore_eos", "messages"}
_WORDS = (" the", "is", " a", " of", "answer", " to", "The", " and", ".", " number", "return")


def alone(ids: Sequence[int]) -> list[tuple[str, Options]]:
    """Every option by itself with its name; `ids` are token ids that answers are likely to hold."""
    drawn = {"temperature": 1.0}
    few = list(dict.fromkeys(ids))
    few_ids: Options = {"allowed_token_ids": few[40:46], "ignore_eos": True}
    return [
        ("greedy", {}),
        ("temperature", {"temperature": 0.8}),
        ("top_p", {**drawn, "top_p": 0.8}),
        ("top_k", {**drawn, "top_k": 20}),
        ("min_p", {**drawn, "min_p": 0.1}),
        ("repetition_penalty", {"repetition_penalty": 1.3}),
        ("repetition_penalty below 1", {"repetition_penalty": 0.8}),
        ("presence_penalty", {"presence_penalty": 1.5}),
        ("frequency_penalty", {"frequency_penalty": 0.7}),
        ("frequency_penalty below 0", {"frequency_penalty": -0.5}),
        ("logit_bias", {"logit_bias": {token: 4.0 - index % 9 for index, token in enumerate(few[:300])}}),
        ("allowed_token_ids", {"allowed_token_ids": few}),
        # With few ids drafts are accepted and hold the same id twice: what a block itself holds then decides.
        ("frequency_penalty over few ids", {**few_ids, "frequency_penalty": 0.4}),
        ("presence_penalty over few ids, drawn", {**few_ids, **drawn, "presence_penalty": 1.0}),
        ("repetition_penalty over few ids", {**few_ids, "repetition_penalty": 1.1}),
        ("bad_words", {"bad_words": list(_WORDS)}),
        ("min_tokens", {"min_tokens": 12, "stop": [".", "\n"]}),
        ("stop", {"stop": [".", " the"]}),
        ("stop_token_ids", {"stop_token_ids": few[:64]}),
        ("ignore_eos", {"ignore_eos": True}),
        ("logprobs", {"logprobs": 20}),
        ("n", {**drawn, "n": 3}),
        ("priority", {"priority": 3.0}),
    ]


def combinations(count: int, ids: Sequence[int], seed: int = 0) -> list[Options]:
    """`count` random combinations; log-probabilities are asked for in most of them, since they change nothing else."""
    generator = random.Random(seed)
    return [_combination(generator, list(dict.fromkeys(ids))) for _ in range(count)]


def is_plain(options: Mapping[str, Any]) -> bool:
    """Whether bench.ties knows the law of these options."""
    return options.keys() <= _PLAIN


def _combination(generator: random.Random, ids: list[int]) -> Options:
    draw = generator
    makers: dict[str, tuple[float, Callable[[], Any]]] = {
        "temperature": (0.6, lambda: round(draw.uniform(0.2, 1.2), 2)),
        "top_p": (0.4, lambda: round(draw.uniform(0.5, 1.0), 2)),
        "top_k": (0.3, lambda: draw.choice((1, 5, 40, 500))),
        "min_p": (0.3, lambda: round(draw.uniform(0.0, 0.3), 2)),
        "repetition_penalty": (0.4, lambda: round(draw.uniform(0.7, 1.6), 2)),
        "presence_penalty": (0.3, lambda: round(draw.uniform(-1.0, 2.0), 2)),
        "frequency_penalty": (0.3, lambda: round(draw.uniform(-1.0, 2.0), 2)),
        "logit_bias": (0.3, lambda: {i: round(draw.uniform(-8, 8), 2) for i in draw.sample(ids, 40)}),
        "allowed_token_ids": (0.15, lambda: sorted(draw.sample(ids, draw.choice((6, len(ids) * 3 // 4))))),
        "bad_words": (0.3, lambda: draw.sample(_WORDS, 4)),
        "min_tokens": (0.3, lambda: draw.randrange(1, 20)),
        "stop": (0.2, lambda: draw.sample([".", "\n", " the", ":", " is"], 2)),
        "stop_token_ids": (0.2, lambda: draw.sample(ids, 8)),
        "ignore_eos": (0.3, lambda: True),
        "logprobs": (0.7, lambda: draw.choice((0, 1, 5, 20))),
        "n": (0.1, lambda: 2),
        "priority": (0.1, lambda: 2.0),
    }
    return {name: make() for name, (chance, make) in makers.items() if draw.random() < chance}
