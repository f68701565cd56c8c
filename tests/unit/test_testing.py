"""The fake gateway does what its documentation says."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kadence import (
    AsyncClient,
    Chunk,
    Client,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RetryConfig,
    UnavailableError,
)
from kadence.testing import FakeGateway, Request

ONCE = RetryConfig(attempts=1, resume_seconds=0)


def test_answers_by_prompt_message_and_ids() -> None:
    with FakeGateway({"Hi": "Hé"}) as gateway, Client(gateway.endpoint) as client:
        result = client.generate("Hi", temperature=0.5, stop="x", logit_bias={3: 1.0}, seed=5, rule="match")
        assert (result.text, result.token_ids, result.finish_reason) == ("Hé", tuple("Hé".encode()), "stop")
        assert (result.prompt_token_ids, result.model, result.seed) == ((72, 105), "fake", 5)
        talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
        assert client.generate(messages=talk).text == "Hé"
        assert client.generate(prompt_token_ids=[72, 105]).text == "Hé"
        assert [model.name for model in client.models()] == ["fake"] and client.status().policy == "off"
    first, second, third = gateway.requests
    assert first.options == {"temperature": 0.5, "stop": ["x"], "logit_bias": {3: 1.0}, "seed": 5, "rule": "match"}
    assert (first.prompt, first.request_id, first.attempt) == ("Hi", result.request_id, 0)
    assert [(message.role, message.content) for message in second.messages] == [("system", "S"), ("user", "Hi")]
    assert (second.prompt, third.prompt, third.prompt_token_ids) == ("Hi", "Hi", (72, 105))


def test_a_function_answers_in_text_or_ids() -> None:
    def answer(request: Request) -> str | bytes | list[str]:
        if request.options.get("n"):
            return ["one", "two"]
        return b"\xff!" if request.prompt == "ids" else request.prompt.upper()

    with FakeGateway(answer, model="mine") as gateway, Client(gateway.endpoint) as client:
        assert client.generate("up").text == "UP"
        assert client.generate("ids").token_ids == (255, 33)
        both = client.generate("x", n=2, max_tokens=2)
        assert (both.text, both.alternatives[0].text, both.finish_reason) == ("on", "tw", "length")
        with pytest.raises(InvalidRequestError, match="was given 2 answers"):
            client.generate("x", n=3)


def test_chunks_and_logprobs_are_the_same_each_time() -> None:
    with FakeGateway({"p": "é"}) as gateway, Client(gateway.endpoint) as client:
        first, second = (list(client.stream("p", logprobs=2)) for _ in range(2))
    assert first == second
    assert [(chunk.token_ids, chunk.text) for chunk in first] == [((0xC3,), ""), ((0xA9,), "é")]
    (item,) = first[0].logprobs
    assert item.token_id == 0xC3 and item.top == ((0xC3, item.logprob), (0xC4, item.logprob - 1))
    assert not Chunk((1,), "").logprobs


def test_it_refuses() -> None:
    with FakeGateway({"p": "x"}) as gateway, Client(gateway.endpoint, retry=ONCE) as client:
        gateway.refuse(OverloadedError("full", retry_after=2.5), times=2)
        gateway.refuse(NotFoundError("no such model"))
        for _ in range(2):
            with pytest.raises(OverloadedError, match="full") as caught:
                client.generate("p")
            assert caught.value.retry_after == 2.5
        with pytest.raises(NotFoundError):
            client.generate("p")
        assert client.generate("p").text == "x"
        with pytest.raises(InvalidRequestError, match="prompt: 'q'; the fake gateway has no answer"):
            client.generate("q")
    assert len(gateway.requests) == 5


def test_it_breaks_off_where_it_was_told() -> None:
    with FakeGateway({"p": "abc"}) as gateway:
        gateway.break_off(2, 0, 3)
        gateway.break_off(1, error=NotFoundError("lost"))
        with Client(gateway.endpoint, retry=ONCE) as client:
            for wanted, kind in (
                (2, UnavailableError),
                (0, UnavailableError),
                (3, UnavailableError),
                (1, NotFoundError),
            ):
                stream, got = client.stream("p"), []
                with pytest.raises(kind):
                    for chunk in stream:
                        got += chunk.token_ids
                assert got == [*b"abc"][:wanted]
            assert client.generate("p").text == "abc"


def test_delays_and_cancellation() -> None:
    with FakeGateway({"p": "ab"}, delay=0.1) as gateway, Client(gateway.endpoint) as client:
        begin = time.monotonic()
        assert client.generate("p").text == "ab"
        assert time.monotonic() - begin >= 0.3
        stream = client.stream("p")
        next(stream)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            next(stream)


def test_the_rule_in_effect() -> None:
    with FakeGateway({"p": "ab"}) as gateway, Client(gateway.endpoint) as client:
        assert [client.generate("p", rule=rule).rule for rule in (None, "match", "ratio")] == [
            "match",
            "match",
            "ratio",
        ]
        gateway.break_off(1)
        assert client.generate("p", rule="ratio").rule == "ratio"


async def test_many_clients_at_once() -> None:
    with FakeGateway(lambda request: request.prompt, delay=0.01) as gateway:
        names = [f"p{i}" for i in range(40)]

        def ask(name: str) -> str:
            with Client(gateway.endpoint) as client:
                return client.generate(name).text

        with ThreadPoolExecutor(20) as pool:
            threads = [asyncio.get_running_loop().run_in_executor(pool, ask, name) for name in names]
            async with AsyncClient(gateway.endpoint) as client:
                results = await asyncio.gather(*(client.generate(name) for name in names))
            assert [result.text for result in results] == names
            assert await asyncio.gather(*threads) == names
    assert len(gateway.requests) == 80


def test_a_taken_port_is_an_error() -> None:
    with FakeGateway({}) as gateway, pytest.raises(OSError, match="cannot be bound"):
        FakeGateway({}, port=int(gateway.endpoint.rpartition(":")[2]))
