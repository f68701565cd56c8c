"""The HTTP API as bytes: what no well-behaved client sends, who leaves, who does not read, and the end."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.scheduler import service
from services.scheduler.http.body import MAX_BYTES
from services.scheduler.http.edge import Edge
from services.scheduler.http.metrics import HttpMetrics
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.http import Response, exchange, post, request
from tests.support.scheduling import Cluster, says, scheduler, settled, until

Web = tuple[Cluster, FakeVerifier]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


def wrong(response: Response) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON: Expecting property name"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "a JSON object"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "stop": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "model": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "max_tokens": true}', "true; an integer"),
        (b'{"prompt": "x", "max_tokens": 99999999999}', "an integer of 32 bits"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "temperature": "hot"}', "'hot'; a number"),
        (b'{"prompt": "x", "seed": 18446744073709551616}', "seed"),
        (b'{"prompt": "x", "logit_bias": {"x": 1}}', "token ids as keys"),
        (b'{"prompt": "x", "logit_bias": [1]}', "an object"),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "only allowed where stream is true"),
        (b'{"prompt": "x", "x\\ud800": 1}', "body: 'x\\ud800'; Unicode text"),
        (b"{}", "prompt: is required"),
    ],
)
async def test_bad_bodies(web: Web, body: bytes, says: str) -> None:
    response = await post(web[0].service.http_address, "/v1/completions", body)
    assert response.status == 400 and says in wrong(response)["message"], response.body
    assert not web[1].submits


async def test_paths_and_methods(web: Web) -> None:
    address = web[0].service.http_address
    assert wrong(await request(address, "GET", "/v2"))["message"] == "no such path: GET /v2"
    response = await request(address, "GET", "/v1/chat/completions")
    assert response.status == 405 and response.headers["allow"] == "POST" and "GET" in wrong(response)["message"]
    assert (await request(address, "DELETE", "/v1/models")).status == 405
    assert (await request(address, "HEAD", "/health")).status == 200


async def test_what_is_tolerated(web: Web) -> None:
    headers = {"content-type": "text/plain", "authorization": "Bearer anything", "x-request-id": " mine "}
    body = {**CHAT, "temperature": None, "stop": None, "tools": [], "tool_choice": "none", "seed": None}
    response = await post(web[0].service.http_address, "/v1/chat/completions", body, headers)
    assert response.status == 200 and response.headers["x-request-id"] == "mine"
    assert web[1].submits[0].stamp.request_id == "mine" and response.json()["id"] == "chatcmpl-mine"


async def test_numbers_are_those_of_grpc(web: Web) -> None:
    # A float of the contract would hold 0 here, and nothing can be divided by that.
    body = {"prompt": "x", "repetition_penalty": 1e-60}
    assert wrong(await post(web[0].service.http_address, "/v1/completions", body))["param"] == "repetition_penalty"


async def test_a_body_that_is_too_long(web: Web) -> None:
    address = web[0].service.http_address
    body = b'{"prompt": "' + b"x" * MAX_BYTES + b'"}'
    response = await post(address, "/v1/completions", body)
    assert response.status == 413 and str(MAX_BYTES) in wrong(response)["message"]
    # Nothing of it is wanted from a client that asks first.
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    assert (await exchange(address, head.encode())).status == 413
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    assert (await exchange(address, chunked + piece * 33 + b"0\r\n\r\n")).status == 413
    # Two million lists take a second to parse, even in a field that nobody looks at.
    lists = b'{"prompt": "x", "max_tokens": 1, "user": [' + b"[]," * 2_000_000 + b"[]]}"
    assert (await post(address, "/v1/completions", lists)).status == 413
    # A long one within the limit is judged by its content.
    long = await post(address, "/v1/completions", {"prompt": "x" * 4_000_000})
    assert long.status == 400 and wrong(long)["param"] == "prompt"


async def test_events_as_bytes(web: Web) -> None:
    says(web[1], [40, 41, 42, 43, 44, tiny_model.END])
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = await post(web[0].service.http_address, "/v1/chat/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.body.decode().split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {frozenset(chunk) for chunk in chunks[:-1]} == {
        frozenset(("id", "object", "created", "model", "choices", "usage"))
    }
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6 and "kadence" in chunks[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(web: Web, stream: bool) -> None:
    cluster, verifier = web
    says(verifier, [40] * 200)
    verifier.step_seconds = 0.02
    host, _, port = cluster.service.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**CHAT, "max_tokens": 200, "n": 2, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(lambda: len(verifier.running) == 2)
    if stream:
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: len(verifier.stops) == 2, seconds=1.0)
    await settled(cluster, verifier)
    status = "200" if stream else "499"
    await until(lambda: cluster.metric("kadence_http_requests_total", route="/v1/chat/completions", status=status))


async def test_a_client_that_does_not_read(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up nobody, what it does not take is not buffered, and it is cut off once its request's time is up."""
    monkeypatch.setattr(service, "_LINGER_SECONDS", 0.2)
    async with (
        scheduler(tokenizer_folder, "inproc", http_port=0, default_timeout_seconds=6.0) as cluster,
        FakeVerifier(cluster.inner, inproc_name="verifier", step_seconds=0.001, max_sessions=64) as verifier,
    ):
        await until(lambda: verifier.streams)
        says(verifier, [40] * 250)
        address, name = cluster.service.http_address, "kadence_http_requests_total"
        body = json.dumps({"prompt": [5], "max_tokens": 250, "n": 64, "logprobs": 20, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, _, port = address.rpartition(":")
            client.connect((host, int(port)))
            client.sendall(head.encode() + body)
            await until(lambda: len(verifier.submits) == 64 and not verifier.running, seconds=10)
            other = await post(address, "/v1/completions", {"prompt": [5], "max_tokens": 4})
            assert other.status == 200
            assert cluster.metric(name, route="/v1/completions", status="200") == 1  # ten megabytes are not sent yet
            await until(lambda: cluster.metric(name, route="/v1/completions", status="200") == 2, seconds=10)
        await settled(cluster, verifier)


async def test_time_is_up(tokenizer_folder: Path) -> None:
    async with (
        scheduler(tokenizer_folder, "inproc", http_port=0, default_timeout_seconds=0.2) as cluster,
        FakeVerifier(cluster.inner, inproc_name="verifier") as verifier,
    ):
        await until(lambda: verifier.streams)
        verifier.gate.clear()
        response = await post(cluster.service.http_address, "/v1/chat/completions", CHAT)
        assert response.status == 504 and wrong(response)["code"] == "timeout"
        await settled(cluster, verifier)


async def test_draining(web: Web) -> None:
    cluster, verifier = web
    address = cluster.service.http_address
    assert (await request(address, "GET", "/health")).json() == {"status": "ok"}
    verifier.gate.clear()
    running = asyncio.create_task(post(address, "/v1/chat/completions", CHAT))
    await until(lambda: verifier.running)
    drain = asyncio.create_task(cluster.service.drain(20))
    await until(lambda: cluster.service._draining)
    health = await request(address, "GET", "/health")
    assert (health.status, health.json()) == (503, {"status": "draining"})
    refused = await post(address, "/v1/chat/completions", CHAT)
    assert refused.status == 503 and refused.headers["retry-after"] == "1"
    assert "shutting down" in wrong(refused)["message"]
    verifier.gate.set()
    answer = await running
    assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] >= 100
    await drain
    with pytest.raises(OSError):
        await request(address, "GET", "/health")


async def test_faults_show_only_the_request_id(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = web[0]

    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(cluster.service._prompts, "understand", broken)
    response = await post(cluster.service.http_address, "/v1/chat/completions", CHAT, {"x-request-id": "r-9"})
    error = wrong(response)
    assert response.status == 500 and error["type"] == "server_error"
    assert "secret" not in error["message"] and "r-9" in error["message"]


async def test_more_requests_than_can_wait_are_refused_unread() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("served")

    edge = Edge(app, HttpMetrics(CollectorRegistry()), most=0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("read")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await edge(scope, receive, send)
    assert sent[0]["status"] == 429 and (b"connection", b"close") in sent[0]["headers"]


async def test_metrics(web: Web) -> None:
    cluster, _ = web
    address = cluster.service.http_address
    await request(address, "GET", "/v1/models/tiny")
    await request(address, "GET", "/v1/models/other")
    for path in ("/a", "/b"):
        await request(address, "GET", path)
    name = "kadence_http_requests_total"
    assert cluster.metric(name, route="/v1/models/{name}", status="200") == 1
    assert cluster.metric(name, route="/v1/models/{name}", status="404") == 1
    assert cluster.metric(name, route="other", status="404") == 2
    assert cluster.metric("kadence_http_request_duration_seconds_count", route="other") == 2
