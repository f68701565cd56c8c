"""What the `openai` package must find behind the HTTP API, once for its synchronous and its asynchronous client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from kadence import AsyncClient, GenerateResult

MESSAGES = [{"role": "user", "content": "Count from one to ten in words, one per line."}]
PROMPT = "1 2 3 4 5 6 7 8"
TOKENS = 24


class Caller:
    """One kind of client behind the same awaitable methods."""

    def __init__(self, client: Any, model: str, sync: bool) -> None:
        self._client = client
        self._sync = sync
        self.model = model

    async def chat(self, **options: Any) -> Any:
        """A chat completion."""
        return await self._call(self._client.chat.completions.create, {"messages": MESSAGES, **options})

    async def complete(self, **options: Any) -> Any:
        """A completion."""
        return await self._call(self._client.completions.create, {"prompt": PROMPT, **options})

    async def models(self) -> list[Any]:
        """The models listed."""
        page = await (asyncio.to_thread(self._client.models.list) if self._sync else self._client.models.list())
        return list(page.data)

    async def read(self, stream: Any) -> list[Any]:
        """All chunks of a stream."""
        return await asyncio.to_thread(list, stream) if self._sync else [chunk async for chunk in stream]

    async def leave(self, stream: Any) -> None:
        """Reads one chunk, then goes."""
        if self._sync:
            await asyncio.to_thread(lambda: (next(iter(stream)), stream.close()))
        else:
            await anext(aiter(stream))
            await stream.close()

    async def _call(self, method: Callable[..., Any], options: dict[str, Any]) -> Any:
        given = {"model": self.model, "max_tokens": TOKENS, **options}
        return await (asyncio.to_thread(method, **given) if self._sync else method(**given))


@asynccontextmanager
async def callers(address: str, model: str) -> AsyncIterator[dict[str, Caller]]:
    """Both kinds, for the HTTP API at `address`; a proxy of the environment is no way to this machine."""
    options: dict[str, Any] = {"base_url": f"http://{address}/v1", "api_key": "none", "max_retries": 0}
    plain = openai.DefaultHttpxClient(trust_env=False)
    aio = openai.DefaultAsyncHttpxClient(trust_env=False)
    with openai.OpenAI(http_client=plain, **options) as one:
        async with openai.AsyncOpenAI(http_client=aio, **options) as other:
            yield {"sync": Caller(one, model, True), "async": Caller(other, model, False)}


@dataclass(frozen=True)
class Told:
    """What the gRPC SDK was told of the same requests."""

    client: AsyncClient
    chat: GenerateResult
    complete: GenerateResult

    @classmethod
    async def ask(cls, client: AsyncClient) -> Told:
        """Both greedy answers."""
        chat = await client.generate(messages=MESSAGES, max_tokens=TOKENS)
        return cls(client, chat, await client.generate(PROMPT, max_tokens=TOKENS))


async def lists_models(caller: Caller, told: Told) -> None:
    """One model, by its name."""
    assert [model.id for model in await caller.models()] == [told.chat.model]


async def chat(caller: Caller, told: Told) -> None:
    """The same text, its end, its cost."""
    answer = await caller.chat()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", told.chat.text)
    assert choice.finish_reason == told.chat.finish_reason and answer.object == "chat.completion"
    _usage(answer.usage, told.chat)
    by_new_name = await caller.chat(max_tokens=openai.omit, max_completion_tokens=TOKENS)
    assert by_new_name.choices[0].message.content == told.chat.text


async def completion(caller: Caller, told: Told) -> None:
    """The same for a plain prompt, for several of them, and for token ids."""
    answer = await caller.complete()
    assert answer.choices[0].text == told.complete.text and answer.object == "text_completion"
    _usage(answer.usage, told.complete)
    both = await caller.complete(prompt=[PROMPT, "Hello"])
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == told.complete.text
    of_ids = await caller.complete(prompt=list(told.complete.prompt_token_ids))
    assert of_ids.choices[0].text == told.complete.text


async def streams(caller: Caller, told: Told) -> None:
    """Pieces that make the text, one reason, usage at the end where it is asked for."""
    stream = await caller.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last = await caller.read(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == told.chat.text
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == told.chat.finish_reason and not any(reasons[:-1])
    assert not last.choices and len({chunk.id for chunk in [*chunks, last]}) == 1
    _usage(last.usage, told.chat)
    chunks = await caller.read(await caller.complete(stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == told.complete.text
    assert not any(chunk.usage for chunk in chunks)


async def log_probabilities(caller: Caller, told: Told) -> None:
    """One entry a token, the chosen one first of the best where the answer is greedy; streamed as whole."""
    answer = await caller.chat(logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == len(told.chat.token_ids)
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True) and entry.logprob == best[0] <= 0
    chunks = await caller.read(await caller.chat(logprobs=True, top_logprobs=3, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    streamed = list(itertools.chain(*(part.content or [] for part in parts)))
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    shape = (await caller.complete(logprobs=2)).choices[0].logprobs
    assert len(shape.tokens) == len(shape.token_logprobs) == len(shape.top_logprobs) == len(told.complete.token_ids)


async def several(caller: Caller, told: Told) -> None:
    """Answer i is what seed + i gives alone; whole and streamed."""
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    alone = [(await caller.chat(seed=seed, **drawn)).choices[0].message.content for seed in (5, 6)]
    both = await caller.chat(seed=5, n=2, **drawn)
    assert [choice.message.content for choice in both.choices] == alone and alone[0] != alone[1]
    texts = ["", ""]
    for chunk in await caller.read(await caller.chat(seed=5, n=2, stream=True, **drawn)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == alone


async def stops(caller: Caller, told: Told) -> None:
    """The answer ends before the string."""
    word = told.chat.text.split()[1]
    answer = (await caller.chat(stop=[word])).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == told.chat.text[: told.chat.text.index(word)]


async def options_and_extensions(caller: Caller, told: Told) -> None:
    """A bias moves the text, penalties are taken, no drafts change nothing."""
    banned = await caller.chat(logit_bias={str(told.chat.token_ids[0]): -100}, logprobs=True)
    plain = await caller.chat(logprobs=True)
    assert banned.choices[0].logprobs.content[0].token != plain.choices[0].logprobs.content[0].token
    await caller.chat(presence_penalty=1.0, frequency_penalty=0.5, extra_body={"repetition_penalty": 1.2, "min_p": 0.1})
    slow = await caller.chat(extra_body={"kadence": {"max_draft_tokens": 0}})
    assert slow.choices[0].message.content == told.chat.text
    statistics = slow.model_extra["kadence"]["stats"][0]
    assert statistics["verified"] == 0 and statistics["steps"] > 0


async def errors(caller: Caller, told: Told) -> None:
    """Each of its class, naming the field."""
    for wrong, field in (
        ({"temperature": 300.0}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"no_such_option": 1}}, "no_such_option"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stream": True, "n": 0}, "n"),
    ):
        try:
            await caller.chat(**wrong)
        except openai.BadRequestError as error:
            assert error.param and field in error.param, f"{wrong}: param is {error.param}"
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        await caller.chat(model="no-such-model")
    except openai.NotFoundError as error:
        assert "no-such-model" in error.message
    else:
        raise AssertionError("an unknown model was taken")


async def leaves(caller: Caller, told: Told) -> None:
    """Whoever closes a stream early takes the request with it."""
    await caller.leave(await caller.chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True}))
    for _ in range(100):
        if not (await told.client.status()).requests_in_flight:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the request goes on")


def _usage(usage: Any, told: GenerateResult) -> None:
    prompt, completion = len(told.prompt_token_ids), len(told.token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, completion)
    assert usage.total_tokens == prompt + completion
    assert 0 <= usage.prompt_tokens_details.cached_tokens < prompt
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 0 and details.rejected_prediction_tokens >= 0


CHECKS: tuple[Callable[[Caller, Told], Awaitable[None]], ...] = (
    lists_models,
    chat,
    completion,
    streams,
    log_probabilities,
    several,
    stops,
    options_and_extensions,
    errors,
    leaves,
)
