"""TLS and tokens: against real TLS servers, and what is refused before anything is dialled."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from kadence import AsyncClient, Client, ConfigError, GenerateResult, RetryConfig, TLSConfig, UnavailableError
from kadence.testing import FakeGateway

ONCE = RetryConfig(attempts=1)
SECRET = "s3cret-of-the-caller"
Ask = Callable[..., Any]


class Authority:
    """A certificate authority and what it signs, as PEM bytes."""

    def __init__(self) -> None:
        self._ca = trustme.CA()
        self.root = self._ca.cert_pem.bytes()

    def issue(self, *names: str) -> tuple[bytes, bytes]:
        """(key, chain)."""
        leaf = self._ca.issue_cert(*names)
        return leaf.private_key_pem.bytes(), b"".join(part.bytes() for part in leaf.cert_chain_pems)

    def server(self, *names: str, clients_of: bytes | None = None) -> FakeGateway:
        proof = grpc.ssl_server_credentials([self.issue(*names)], clients_of, clients_of is not None)
        return FakeGateway({"Hi": "Hello"}, credentials=proof)


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def others() -> Authority:
    return Authority()


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    """Sends "Hi" with a client of the kind under test."""

    async def run(endpoint: str, **options: Any) -> GenerateResult:
        options = {"retry": ONCE, "timeout": 10.0, **options}
        if request.param is AsyncClient:
            async with AsyncClient(endpoint, **options) as client:
                return await client.generate("Hi")

        def call() -> GenerateResult:
            with Client(endpoint, **options) as client:
                return client.generate("Hi")

        return await asyncio.to_thread(call)

    yield run


async def test_a_certificate_of_a_trusted_authority(ask: Ask, ours: Authority, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(ours.root)
    with ours.server("127.0.0.1") as gateway:
        for roots in (ours.root, path, str(path)):
            assert (await ask(gateway.endpoint, tls=TLSConfig(roots))).text == "Hello"


async def test_why_tls_fails(ask: Ask, ours: Authority, others: Authority) -> None:
    with ours.server("127.0.0.1") as gateway, ours.server("kadence.example") as named, FakeGateway({}) as plain:
        cases = [
            (gateway, TLSConfig(others.root), "certificate is from no authority in root_certificates"),
            (gateway, TLSConfig(), "certificate is from no authority in root_certificates"),
            (named, TLSConfig(ours.root), "certificate is for another name; see server_name"),
            (plain, TLSConfig(ours.root), "the server does not speak TLS"),
            (gateway, None, "the server may ask for TLS"),
        ]
        for server, tls, reason in cases:
            with pytest.raises(UnavailableError, match=reason):
                await ask(server.endpoint, tls=tls)
        named_so = TLSConfig(ours.root, server_name="kadence.example")
        assert (await ask(named.endpoint, tls=named_so)).text == "Hello"


async def test_mutual_tls(ask: Ask, ours: Authority, others: Authority, tmp_path: Path) -> None:
    key, chain = ours.issue("client@kadence.example")
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "chain.pem").write_bytes(chain)
    with ours.server("127.0.0.1", clients_of=ours.root) as gateway:
        known = TLSConfig(ours.root, tmp_path / "chain.pem", tmp_path / "key.pem")
        assert (await ask(gateway.endpoint, tls=known)).text == "Hello"
        other_key, other_chain = others.issue("client@kadence.example")
        for tls in (TLSConfig(ours.root), TLSConfig(ours.root, other_chain, other_key)):
            with pytest.raises(UnavailableError, match="perhaps for want of a client certificate"):
                await ask(gateway.endpoint, tls=tls)


def test_files_that_cannot_be_used(ours: Authority, tmp_path: Path) -> None:
    key, chain = ours.issue("me@kadence.example")
    absent, text, cut = tmp_path / "absent.pem", tmp_path / "text.pem", tmp_path / "cut.pem"
    text.write_text("hello")
    cut.write_bytes(ours.root[:200] + b"\n-----END CERTIFICATE-----\n")
    cases = {
        TLSConfig(absent): f"tls.root_certificates: {absent}: cannot be read: No such file or directory",
        TLSConfig(tmp_path): f"tls.root_certificates: {tmp_path}: cannot be read: Is a directory",
        TLSConfig(text): f"tls.root_certificates: {text}: holds no certificate in PEM form",
        TLSConfig(cut): f"tls.root_certificates: {cut}: holds a damaged certificate",
        TLSConfig(b"hello"): "tls.root_certificates: holds no certificate in PEM form",
        TLSConfig(5): "tls.root_certificates: int; a path, or PEM text as bytes",  # type: ignore[arg-type]
        TLSConfig(None, chain): "tls.client_key: is not set; a client certificate and its key go together",
        TLSConfig(None, None, key): "tls.client_certificate: is not set; a client certificate and its key go together",
        TLSConfig(None, text, key): f"tls.client_certificate: {text}: holds no certificate in PEM form",
        TLSConfig(None, chain, text): f"tls.client_key: {text}: holds no private key in PEM form",
        TLSConfig(None, chain, chain): "tls.client_key: holds no private key in PEM form",
    }
    for tls, message in cases.items():
        for kind in (Client, AsyncClient):
            with pytest.raises(ConfigError) as caught:
                kind("127.0.0.1:1", tls=tls)
            assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert key.decode() not in repr(TLSConfig(None, chain, key))


async def test_a_token_travels_as_metadata(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KADENCE_TOKEN", "from-the-environment")
    numbers = iter(range(10))
    with FakeGateway({"Hi": "Hello"}) as gateway:
        await ask(gateway.endpoint)
        await ask(gateway.endpoint, token=SECRET)
        gateway.break_off(2)  # a token that is made anew for each call is asked again when a stream is resumed
        await ask(gateway.endpoint, token=lambda: f"t-{next(numbers)}")
        await ask(gateway.endpoint, token="")
        await ask(gateway.endpoint, token=SECRET, metadata={"authorization": "Basic x"})
    sent = [request.metadata.get("authorization") for request in gateway.requests]
    assert sent == ["Bearer from-the-environment", f"Bearer {SECRET}", "Bearer t-0", "Bearer t-1", None, "Basic x"]


async def test_a_token_travels_under_tls(ask: Ask, ours: Authority) -> None:
    with ours.server("127.0.0.1") as gateway:
        await ask(gateway.endpoint, tls=TLSConfig(ours.root), token=SECRET)
    assert gateway.requests[0].metadata["authorization"] == f"Bearer {SECRET}"


def test_a_token_does_not_leave_this_machine_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KADENCE_TOKEN", raising=False)
    far = ("10.0.0.1:1", "kadence.example:1", "127.evil.example:1", "0.0.0.0:1", "[::2]:1")
    near = ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1")
    for kind in (Client, AsyncClient):
        for endpoint in far:
            with pytest.raises(ConfigError) as caught:
                kind(endpoint, token=SECRET)
            assert str(caught.value).startswith(f"token: would travel unencrypted to {endpoint}, ")
            assert SECRET not in str(caught.value)
            with pytest.raises(ConfigError):
                kind(endpoint, token=lambda: SECRET)
            kind(endpoint, token=SECRET, tls=TLSConfig())
            kind(endpoint, token=SECRET, allow_insecure_token=True)
            kind(endpoint, token="")
        for endpoint in near:
            kind(endpoint, token=SECRET)
    monkeypatch.setenv("KADENCE_TOKEN", SECRET)
    with pytest.raises(ConfigError, match=r"^KADENCE_TOKEN: would travel unencrypted"):
        Client("kadence.example:1")


async def test_a_token_shows_nowhere(ask: Ask) -> None:
    for wrong in (f"{SECRET}\n", f"{SECRET} x", f"{SECRET}é"):
        with FakeGateway({}) as gateway:
            for token in (wrong, lambda wrong=wrong: wrong):
                with pytest.raises(ConfigError, match="printable ASCII text without spaces") as caught:
                    await ask(gateway.endpoint, token=token)
                assert SECRET not in "".join(traceback.format_exception(caught.value))
    with Client("127.0.0.1:1", token=SECRET, retry=ONCE) as client:
        assert SECRET not in repr(client) + repr(vars(client)) + repr(client._settings)
        stream = client.stream("Hi")
        assert SECRET not in repr(stream) + repr(vars(stream)) + repr(stream._exchange._prepared)
        with pytest.raises(UnavailableError) as failed:
            next(stream)
    assert SECRET not in "".join(traceback.format_exception(failed.value))
