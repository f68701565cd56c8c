"""A whole cluster inside this process, for scripts and notebooks: `LLM(...).generate(prompts)`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex, TypeVar, Unpack

from kadence._aio import AsyncClient, AsyncStream
from kadence._wire import short
from kadence.errors import ExtraMissingError, InvalidRequestError
from kadence.types import Chunk, GenerateOptions, GenerateResult, Message

T = TypeVar("T")
Prompt = str | Sequence[int]
Conversation = Sequence[Message | Mapping[str, str]]

# The implementation is found by entry point, so that the SDK imports nothing of the cluster.
GROUP, NAME = "kadence.cluster", "inproc"
_AT_ONCE = 256  # requests under way; the rest wait here, where their time does not run yet


class Hosted(Protocol):
    """A cluster in a background thread with an event loop of its own, as the entry point's function returns it."""

    client: AsyncClient
    """Belongs to that loop."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it in the cluster's loop and waits; returns or raises what it does."""

    def close(self) -> None:
        """Ends everything; safe to call twice."""


class LLM:
    """A model with its drafter, served inside this process. Use it as a context manager, or call close().

    `model` is a folder or a name that `kadence models list` shows, fetched if it is missing; `drafter` is one kind, or
    the whole table: `drafter={"kind": "dflash2", "options": {"checkpoint": folder}}`, and without it the one shipped
    for the model, else "ngram"; `policy` is "off" or "fixed:K". Any other key of a configuration file goes by its
    table: `verifier={"kv_tokens": 65536}`. Threads may share it, and whether an event loop runs in the caller's thread
    does not matter. Raises ConfigError or CheckpointError, one line, and ExtraMissingError where the cluster's packages
    are not installed.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        drafter: str | Mapping[str, Any] | None = None,
        policy: str | None = None,
        *,
        dtype: str | None = None,
        **config: Any,
    ) -> None:
        drafting = "drafter" if isinstance(drafter, Mapping) else "drafter.kind"
        named = {"model.path": str(model), drafting: drafter, "policy.name": policy, "model.dtype": dtype}
        self._hosted = _start()({**config, **{key: value for key, value in named.items() if value is not None}})
        self._client = self._hosted.client
        self.endpoint = self._client.endpoint
        """Where other clients find it while it is open, "host:port"."""
        self._end = weakref.finalize(self, self._hosted.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        per_prompt: Sequence[GenerateOptions] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]:
        """The answers to texts, or to lists of token ids, in their order; one prompt makes a list of one.

        `options` are for all prompts, `per_prompt` (one each) goes over them. The first answer that fails ends the
        others and raises its APIError.
        """
        _check_list("prompts", prompts, "a text, a list of token ids, or a list of either", str)
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], SupportsIndex))
        listed = [prompts] if one else list(prompts)
        fields = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in listed]
        return self._answers(fields, per_prompt, options)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        per_prompt: Sequence[GenerateOptions] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]:
        """The answers to conversations, as generate() gives them; a single list of messages is one conversation."""
        _check_list("conversations", conversations, "a list of messages, or a list of such lists")
        one = len(conversations) > 0 and isinstance(conversations[0], Message | Mapping)
        listed: list[Any] = [conversations] if one else list(conversations)
        return self._answers([{"messages": messages} for messages in listed], per_prompt, options)

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> LLMStream:
        """One answer piece by piece: an iterator over Chunks. Leaving its `with` block early cancels it."""

        async def opened() -> AsyncStream:
            return self._client.stream(prompt, **options)

        return LLMStream(self._run, self._run(opened()))

    def close(self) -> None:
        """Cancels what is running and ends the cluster; no thread and no port stays. Safe to call twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._end.alive:
            coroutine.close()
            raise RuntimeError("the LLM is closed")
        return self._hosted.run(coroutine)

    def _answers(
        self, fields: list[dict[str, Any]], per_prompt: Sequence[GenerateOptions] | None, options: GenerateOptions
    ) -> list[GenerateResult]:
        if per_prompt is not None:
            _check_list("per_prompt", per_prompt, "a list of options")
            for index, extra in enumerate(per_prompt):
                if not isinstance(extra, Mapping):
                    raise InvalidRequestError.of(f"per_prompt[{index}]", f"{short(extra)}; options by name")
            if len(per_prompt) != len(fields):
                reason = f"{len(per_prompt)} options for {len(fields)} prompts; one each"
                raise InvalidRequestError.of("per_prompt", reason)
        extras: Sequence[Any] = per_prompt if per_prompt is not None else [{}] * len(fields)
        requests = [{**options, **extra, **field} for field, extra in zip(fields, extras, strict=True)]
        return self._run(_all(self._client, requests))


class LLMStream:
    """An answer that is arriving. Iterate it; `result` is there after the end."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], stream: AsyncStream) -> None:
        self._run = run
        self._stream = stream

    @property
    def result(self) -> GenerateResult:
        """The finished answer. Raises RuntimeError before the iteration's end."""
        return self._stream.result

    @property
    def request_id(self) -> str:
        """The effective request id; empty before the first chunk."""
        return self._stream.request_id

    def cancel(self) -> None:
        """Ends the answer; further iteration raises RequestCancelledError. Nothing happens after the end."""

        async def cancelled() -> None:
            self._stream.cancel()

        self._run(cancelled())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk: Chunk | None = self._run(_wait(anext(self._stream, None)))
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()


def _check_list(name: str, value: Any, wanted: str, *others: type) -> None:
    """Raises InvalidRequestError unless `value` has a length and positions, or is one of `others`."""
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not isinstance(value, others) and (not listed or isinstance(value, str | bytes | Mapping)):
        raise InvalidRequestError.of(name, f"{short(value)}; {wanted}")


async def _all(client: AsyncClient, requests: list[dict[str, Any]]) -> list[GenerateResult]:
    seats = asyncio.Semaphore(_AT_ONCE)

    async def one(request: dict[str, Any]) -> GenerateResult:
        async with seats:
            return await client.generate(**request)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _wait(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _start() -> Callable[[Mapping[str, Any]], Hosted]:
    """The function that brings a cluster up from configuration keys. Raises ExtraMissingError."""
    entry = next(iter(entry_points(group=GROUP, name=NAME)), None)
    try:
        if entry is None:
            raise ImportError(f"no entry point {GROUP}:{NAME}")
        start: Callable[[Mapping[str, Any]], Hosted] = entry.load()
    except ImportError as error:
        raise ExtraMissingError(
            f"LLM needs a package that is not installed ({error}): pip install 'kadence[cluster]'"
        ) from error
    return start
