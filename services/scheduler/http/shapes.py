"""The JSON of answers: chat completions and completions, whole and as chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from services.scheduler.http import logprobs
from services.scheduler.http.job import Job
from services.scheduler.http.logprobs import ChatLogprobs, Collector, CompletionLogprobs
from services.scheduler.outcomes import End, FinishReason, Piece
from services.scheduler.tokenizer import Tokenizer

# One encoder for all: json.dumps would make a new one for every call with these options.
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode_bytes(value: Any) -> bytes:
    """JSON of what may quote a client's text, which need not be Unicode."""
    return encode(value).encode(errors="replace")


class Shape(NamedTuple):
    """How one route shapes its answers."""

    prefix: str
    """Of ids."""
    object: str
    chunk_object: str
    collector: Callable[[Tokenizer], Collector]
    opening: dict[str, Any] | None
    """What the first chunk of an answer says, if there is one."""
    delta: Callable[[str], dict[str, Any]]
    """New text."""
    message: Callable[[str], dict[str, Any]]
    """The whole text."""


CHAT = Shape(
    prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    collector=ChatLogprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
)
COMPLETION = Shape(
    prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
    collector=CompletionLogprobs,
    opening=None,
    delta=lambda text: {"text": text},
    message=lambda text: {"text": text},
)


class Whole:
    """Gathers all events of a job into one body."""

    def __init__(self, shape: Shape, job: Job, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._shape = shape
        self._job = job
        self._texts: list[list[str]] = [[] for _ in range(job.answers)]
        self._collectors = [shape.collector(tokenizer) for _ in self._texts] if with_logprobs else []
        self._parts: list[list[dict[str, Any]]] = [[] for _ in self._texts]
        self._ends: dict[int, End] = {}

    def add(self, index: int, event: Piece | End) -> None:
        """Takes one event of answer `index`."""
        self._texts[index].append(event.text)
        if isinstance(event, End):
            self._ends[index] = event
        elif self._collectors:
            self._parts[index].append(self._collectors[index].add(event.token_ids, event.logprobs))

    async def body(self) -> bytes:
        """The JSON, once every answer has ended; other requests have their turn between two answers."""
        common: dict[str, Any] = {"id": self._shape.prefix + self._job.request_id, "object": self._shape.object}
        common |= {"created": self._job.created, "model": self._job.first.model}
        rest = {"usage": usage(self._job, self._ends), "kadence": statistics(self._job, self._ends)}
        choices = []
        for index in range(self._job.answers):
            choices.append(encode(self._choice(index)))
            await asyncio.sleep(0)
        return f'{encode(common)[:-1]},"choices":[{",".join(choices)}],{encode(rest)[1:]}'.encode()

    def _choice(self, index: int) -> dict[str, Any]:
        collectors = self._collectors
        parts = self._parts[index] or ([collectors[index].add((), ())] if collectors else [])
        return {
            "index": index,
            **self._shape.message("".join(self._texts[index])),
            "logprobs": logprobs.join(parts) if collectors else None,
            "finish_reason": finish_reason(self._ends[index]),
        }


class Chunks:
    """Turns each event of a job into server-sent events; what they have in common is encoded once."""

    def __init__(
        self, shape: Shape, job: Job, tokenizer: Tokenizer, *, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._shape = shape
        self._job = job
        self._include_usage = include_usage
        self._collectors = [shape.collector(tokenizer) for _ in range(job.answers)] if with_logprobs else []
        self._opened: set[int] = set()
        self._ends: dict[int, End] = {}
        common = {"id": shape.prefix + job.request_id, "object": shape.chunk_object, "created": job.created}
        self._head = "data: " + encode(common | {"model": job.first.model})[:-1] + ',"choices":['
        self._tail = ']%s,"usage":null}\n\n' if include_usage else "]%s}\n\n"

    def of(self, index: int, event: Piece | End) -> bytes:
        """The chunks of one event of answer `index`; may be none, where text is held back."""
        lines = []
        if index not in self._opened:
            self._opened.add(index)
            if self._shape.opening is not None:
                lines.append(self._line(index, self._shape.opening))
        shown = None
        if self._collectors and isinstance(event, Piece):
            shown = self._collectors[index].add(event.token_ids, event.logprobs)
        if event.text or shown is not None:
            lines.append(self._line(index, self._shape.delta(event.text), shown))
        if isinstance(event, End):
            self._ends[index] = event
            lines.append(self._line(index, self._shape.delta(""), reason=finish_reason(event), extra=self._last()))
            if len(self._ends) == self._job.answers:
                lines.append(self._ending())
        return "".join(lines).encode()

    def _line(
        self,
        index: int,
        content: dict[str, Any],
        shown: dict[str, Any] | None = None,
        reason: str | None = None,
        extra: str = "",
    ) -> str:
        choice = encode({"index": index, **content, "logprobs": shown, "finish_reason": reason})
        return self._head + choice + self._tail % extra

    def _last(self) -> str:
        """What the finish chunk adds if it is the last of the stream."""
        if self._include_usage or len(self._ends) < self._job.answers:
            return ""
        return ',"kadence":' + encode(statistics(self._job, self._ends))

    def _ending(self) -> str:
        done = "data: [DONE]\n\n"
        if not self._include_usage:
            return done
        rest = {"usage": usage(self._job, self._ends), "kadence": statistics(self._job, self._ends)}
        return f"{self._head}],{encode(rest)[1:]}\n\n{done}"


def finish_reason(end: End) -> str:
    """OpenAI's word for it."""
    return "length" if end.reason is FinishReason.LENGTH else "stop"


def usage(job: Job, ends: dict[int, End]) -> dict[str, Any]:
    """Tokens of the whole request. A prompt counts once, however many answers it has, and so does what was cached."""
    prompt = sum(len(generation.prompt_token_ids) for generation in job.generations)
    completion = sum(end.completion_tokens for end in ends.values())
    accepted = sum(end.stats.accepted for end in ends.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(ends[index].stats.cached_tokens for index in range(0, job.answers, job.first.n))
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.stats.verified for end in ends.values()) - accepted,
        },
    }


def statistics(job: Job, ends: dict[int, End]) -> dict[str, Any]:
    """What only Kadence tells: enough to repeat the request, and how speculation went, answer by answer."""
    ordered = [ends[index] for index in range(job.answers)]
    return {
        "seed": job.first.seed,
        "rule": job.first.rule.name.lower(),
        "attempt": max(generation.attempt for generation in job.generations),
        "stats": [_stats(end) for end in ordered],
        "stop_match": [end.stop_match or None for end in ordered],
    }


def _stats(end: End) -> dict[str, Any]:
    stats = end.stats
    return {
        "steps": stats.steps,
        "drafted": stats.drafted,
        "verified": stats.verified,
        "accepted": stats.accepted,
        "committed": stats.committed,
        "acceptance_length": round(stats.committed / stats.steps, 4) if stats.steps else 0.0,
        "k_hist": stats.k_hist,
        "cached_tokens": stats.cached_tokens,
    }
