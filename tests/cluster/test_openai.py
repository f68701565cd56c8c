"""The `openai` package against a real scheduler and a scripted verifier: what its users do, sync and async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kadence.v1 import types_pb2
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, says, scheduler, settled, until

CHAT = [{"role": "user", "content": "hi"}]
TEXT = "hello, 日本語 🙂 world"

Call = Callable[..., Any]


class Caller:
    """One of the two clients; its calls are awaited either way, and streams come as lists."""

    def __init__(self, kind: str, address: str) -> None:
        options: dict[str, Any] = {
            "base_url": f"http://{address}/v1",
            "api_key": "any",
            "max_retries": 0,
            "timeout": 20,
        }
        self.client: Any = openai.AsyncOpenAI(**options) if kind == "async" else openai.OpenAI(**options)
        self._sync = kind == "sync"

    async def __call__(self, call: Call, **options: Any) -> Any:
        if self._sync:
            return await asyncio.to_thread(lambda: _listed(call(**options)))
        answer = await call(**options)
        return [item async for item in answer] if inspect.isasyncgen(answer) or hasattr(answer, "__anext__") else answer

    async def chat(self, **options: Any) -> Any:
        create = self.client.chat.completions.create
        return await self(create, **{"model": "tiny", "messages": CHAT, "max_tokens": 100, **options})

    async def complete(self, **options: Any) -> Any:
        create = self.client.completions.create
        return await self(create, **{"model": "tiny", "prompt": "the fox", "max_tokens": 100, **options})


def _listed(answer: Any) -> Any:
    return list(answer) if hasattr(answer, "__next__") else answer


@pytest.fixture(params=["sync", "async"])
async def caller(request: pytest.FixtureRequest, web: tuple[Cluster, FakeVerifier]) -> Caller:
    return Caller(request.param, web[0].service.http_address)


@pytest.fixture
def verifier(web: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> FakeVerifier:
    says(web[1], [*tokenizer.encode(TEXT), tiny_model.END])
    return web[1]


async def test_models(caller: Caller, verifier: FakeVerifier) -> None:
    listed = (await caller(caller.client.models.list)).data
    assert [(model.id, model.object, model.max_model_len) for model in listed] == [
        ("tiny", "model", tiny_model.CONTEXT)
    ]
    assert (await caller(caller.client.models.retrieve, model="tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await caller(caller.client.models.retrieve, model="other")
    assert caught.value.code == "model_not_found"


async def test_chat(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]
    answer = await caller.chat(messages=messages)
    prompt = tokenizer.encode_chat([("system", "be brief"), ("user", "hi")])
    assert list(verifier.submits[0].prompt_token_ids) == prompt
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.id == "chatcmpl-" + verifier.submits[0].stamp.request_id == f"chatcmpl-{answer._request_id}"
    count = len(tokenizer.encode(TEXT)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), count)
    assert answer.usage.total_tokens == len(prompt) + count
    own = answer.kadence
    steps = own["stats"][0]["steps"]
    assert own["seed"] == verifier.submits[0].sampling.seed and own["rule"] == "match" and own["attempt"] == 0
    assert own["stop_match"] == ["<|end|>"]
    # The scripted verifier accepts all but one of the tokens of a step, of five that it verifies.
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == count - 1 - steps
    assert details.rejected_prediction_tokens == 5 * steps - details.accepted_prediction_tokens
    assert own["stats"][0]["acceptance_length"] == round((count - 1) / steps, 4)


async def test_an_answer_can_be_sent_back(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    message = (await caller.chat()).choices[0].message
    await caller.chat(messages=[*CHAT, message.model_dump(), *CHAT])
    prompt = tokenizer.encode_chat([("user", "hi"), ("assistant", TEXT), ("user", "hi")])
    assert list(verifier.submits[1].prompt_token_ids) == prompt


async def test_completions(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    answer = await caller.complete(prompt=["the fox", "a dog"])
    assert answer.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, TEXT, "stop"),
        (1, TEXT, "stop"),
    ]
    prompts = [tokenizer.encode("the fox"), tokenizer.encode("a dog")]
    assert [list(submit.prompt_token_ids) for submit in verifier.submits] == prompts
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert len({submit.sampling.seed for submit in verifier.submits}) == 1
    ids = await caller.complete(prompt=[5, 6, 7])
    assert list(verifier.submits[2].prompt_token_ids) == [5, 6, 7] and ids.choices[0].text == TEXT
    await caller.complete(prompt=[[5], [6, 7]], stream=True)
    assert [list(submit.prompt_token_ids) for submit in verifier.submits[3:]] == [[5], [6, 7]]


async def test_several_prompts_with_several_answers(
    caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer
) -> None:
    # An answer that names its prompt and its seed.
    verifier.script = lambda submit: [submit.prompt_token_ids[0], 40 + submit.sampling.seed % 10]
    wanted = [[p, s] for p in (60, 70) for s in (47, 48, 49)]
    texts = [tokenizer.decode(ids) for ids in wanted]
    answer = await caller.complete(prompt=[[60], [70]], n=3, seed=7)
    assert [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)] == texts
    chunks = await caller.complete(prompt=[[60], [70]], n=3, seed=7, stream=True)
    streamed = [""] * 6
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert len(chunks[-1].kadence["stats"]) == 6


async def test_streaming(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    chunks = await caller.chat(stream=True, stream_options={"include_usage": True})
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    first, *middle, finish, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == TEXT
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert finish.choices[0].finish_reason == "stop" and finish.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert last.choices == [] and last.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1
    assert last.kadence["stop_match"] == ["<|end|>"]
    without = await caller.chat(stream=True)
    assert without[-1].choices[0].finish_reason == "stop" and without[-1].kadence["stats"][0]["steps"] > 0
    texts = [chunk.choices[0].text for chunk in await caller.complete(stream=True)]
    assert "".join(texts) == TEXT


async def test_usage_counts_a_prompt_once(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    verifier.cached = 2
    answer = await caller.complete(prompt=[[5, 6, 7], [8, 9, 10, 11]], n=3)
    count = len(tokenizer.encode(TEXT)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 6 * count)
    assert answer.usage.total_tokens == 7 + 6 * count
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert [stats["cached_tokens"] for stats in answer.kadence["stats"]] == [2] * 6


async def test_stop_and_length(caller: Caller, verifier: FakeVerifier) -> None:
    answer = await caller.chat(stop="world")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT[: -len("world")], "stop")
    assert answer.kadence["stop_match"] == ["world"]
    chunks = await caller.complete(stop=["zebra", " wor"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT[: -len(" world")]
    answer = await caller.chat(max_completion_tokens=4, max_tokens=openai.omit)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 4


async def test_options_arrive(caller: Caller, verifier: FakeVerifier) -> None:
    own = {"max_draft_tokens": 0, "rule": "ratio", "priority": 2.0}
    further = {"top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [9]}
    more = {"ignore_eos": True, "allowed_token_ids": [5, 9, 11], "bad_words": ["fox"], "kadence": own}
    answer = await caller.chat(
        temperature=0.5,
        top_p=0.75,
        seed=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "11": 1.5},
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={**further, **more},
    )
    sampling = verifier.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 3, 0.25)
    assert sampling.seed == 2**64 - 1 and sampling.max_tokens == 100 and sampling.min_tokens == 2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5 and dict(sampling.logit_bias) == {5: -100.0, 11: 1.5}
    assert list(sampling.stop_token_ids) == [9] and list(sampling.allowed_token_ids) == [5, 9, 11]
    assert sampling.bad_words and sampling.max_draft_tokens == 0 and sampling.priority == 2.0
    assert sampling.rule == types_pb2.RULE_RATIO and answer.kadence["rule"] == "ratio"


async def test_chat_logprobs(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    answer = await caller.chat(logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    ids = [*tokenizer.encode(TEXT), tiny_model.END]
    assert b"".join(bytes(entry.bytes) for entry in content) == TEXT.encode() + b"<|end|>"
    assert [entry.logprob for entry in content] == [-1.5] * len(ids)
    # A cut character has no text of its own; the scripted law puts the token itself second.
    assert any(entry.token.startswith("bytes:\\x") for entry in content)
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == [-1.0, -1.5]
        assert entry.top_logprobs[1].token == entry.token and entry.top_logprobs[1].bytes == entry.bytes
    streamed = await caller.chat(logprobs=True, top_logprobs=2, stream=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece] == content
    only = (await caller.chat(logprobs=True)).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in only] == [[]] * len(ids)


async def test_completion_logprobs(caller: Caller, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    answer = (await caller.complete(logprobs=1)).choices[0]
    shown, ids = answer.logprobs, [*tokenizer.encode(TEXT), tiny_model.END]
    assert (
        len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(shown.text_offset) == len(ids)
    )
    for index, token in enumerate(shown.tokens):
        assert shown.top_logprobs[index][token] == shown.token_logprobs[index] == -1.5
        assert len(shown.top_logprobs[index]) == 2
        # The independent count: characters of the text of all tokens before, without a cut one at the end.
        assert shown.text_offset[index] == len(tokenizer.decode(ids[:index]).rstrip("\ufffd"))
        if not token.startswith("bytes:") and token != "<|end|>":
            assert answer.text[shown.text_offset[index] :].startswith(token)
    streamed = await caller.complete(logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == shown.tokens
    assert [offset for part in parts for offset in part.text_offset] == shown.text_offset


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "-1"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_completion_tokens": 5000, "max_tokens": openai.omit}, "max_completion_tokens", "5000"),
        ({"n": 1000}, "n", "1000"),
        ({"stop": ["x"] * 99}, "stop", "99"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "99"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "9999"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported yet"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean temperature"),
        ({"extra_body": {"kadence": {"rule": "best"}}}, "kadence.rule", "ratio"),
        ({"extra_body": {"kadence": {"max_draft_tokens": -1}}}, "kadence.max_draft_tokens", "-1"),
        ({"extra_body": {"kadence": {"k": 1}}}, "kadence.k", "unknown field"),
        ({"extra_headers": {"X-Request-Id": "x" * 200}}, "x-request-id", "200 bytes"),
    ],
)
async def test_bad_requests(
    caller: Caller, verifier: FakeVerifier, options: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await caller.chat(**options)
    error = caught.value
    assert error.param is not None and error.param.split("[9999]")[0] == param and error.type == "invalid_request_error"
    assert says in error.message and "sampling." not in error.message and error.request_id
    assert not verifier.submits


async def test_bad_completions(caller: Caller, verifier: FakeVerifier) -> None:
    cases: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": [1, "x"]},
        "prompt[1][0]": {"prompt": [[5], [9999]]},
        "prompt[1]": {"prompt": ["x", ""]},
        "echo": {"echo": True},
        "best_of": {"best_of": 3},
        "suffix": {"suffix": "x"},
        "logprobs": {"logprobs": 99},
    }
    for param, options in cases.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await caller.complete(**options)
        assert caught.value.param == param
    await caller.complete(echo=False, best_of=1, suffix="")


async def test_other_errors(web: tuple[Cluster, FakeVerifier], caller: Caller, verifier: FakeVerifier) -> None:
    cluster = web[0]
    with pytest.raises(openai.NotFoundError) as missing:
        await caller.chat(model="other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    verifier.gate.clear()
    others = Caller("async", cluster.service.http_address)
    # Nine run, one more than the verifier's places, and four wait.
    held = [asyncio.create_task(others.chat(extra_headers={"X-Request-Id": f"r{i}"})) for i in range(13)]
    await until(lambda: cluster.service._dispatcher.queued == 4 or any(task.done() for task in held))
    assert [task.result() for task in held if task.done()] == []
    with pytest.raises(openai.RateLimitError) as busy:
        await caller.chat(stream=True)
    assert busy.value.code == "rate_limit_exceeded" and int(busy.value.response.headers["retry-after"]) >= 1
    assert float(busy.value.response.headers["retry-after-ms"]) > 0
    verifier.gate.set()
    assert {answer.id for answer in await asyncio.gather(*held)} == {f"chatcmpl-r{i}" for i in range(13)}
    verifier.gate.clear()
    first = asyncio.create_task(others.chat(extra_headers={"X-Request-Id": "same"}))
    await until(lambda: cluster.service._dispatcher.in_flight == 1)
    with pytest.raises(openai.ConflictError):
        await caller.chat(extra_headers={"X-Request-Id": "same"})
    verifier.gate.set()
    await first
    verifier.refuse = ("INTERNAL", "it broke")
    with pytest.raises(openai.InternalServerError) as broken:
        await caller.chat()
    assert broken.value.status_code == 500


async def test_no_verifier_is_503(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder, http_port=0, attach_wait_seconds=0.05) as cluster:
        caller = Caller("async", cluster.service.http_address)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="no verifier is attached") as caught:
                await caller.chat(stream=stream)
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"


async def test_an_error_in_the_middle_of_a_stream(web: tuple[Cluster, FakeVerifier], verifier: FakeVerifier) -> None:
    cluster = web[0]
    caller = Caller("async", cluster.service.http_address)
    says(verifier, [40] * 100)
    verifier.step_seconds = 0.05
    stream = await caller.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=90, stream=True)
    seen = 0
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            seen += 1
            if seen == 3:
                drain = asyncio.create_task(cluster.service.drain(0))
    assert seen >= 3
    await drain


async def test_leaving_a_stream_cancels(
    web: tuple[Cluster, FakeVerifier], caller: Caller, verifier: FakeVerifier
) -> None:
    says(verifier, [40] * 200)
    verifier.step_seconds = 0.01

    def leave() -> None:
        with openai.OpenAI(base_url=f"http://{web[0].service.http_address}/v1", api_key="any") as client:
            stream = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=200, stream=True, n=2)  # type: ignore[arg-type]
            next(iter(stream))
            stream.close()

    await asyncio.to_thread(leave)
    await settled(*web)
    assert len(verifier.stops) == 2
