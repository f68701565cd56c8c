"""Certificates and tokens of a connection: read, checked, and kept out of every text."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from kadence import _core
from kadence.errors import ConfigError
from kadence.types import RetryConfig, TLSConfig

Token = str | Callable[[], str]
"""A token, or what gives one; it is asked for each call and must not block."""

_TOKEN = re.compile(r"[\x21-\x7e]+\Z")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\s.+-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )?PRIVATE KEY-----\s.+-----END ([A-Z]+ )?PRIVATE KEY-----", re.DOTALL)


def settings(
    endpoint: str,
    timeout: float,
    retry: RetryConfig | None,
    metadata: Mapping[str, str] | None,
    tls: TLSConfig | None,
    token: Token | None,
    allow_insecure_token: bool,
) -> _core.Settings:
    """What a client to `endpoint` applies to its calls; a token that is None is $KADENCE_TOKEN, if that is set.

    Raises ConfigError for a token that cannot travel, or not without being read on its way.
    """
    origin, found = ("token", token) if token is not None else ("KADENCE_TOKEN", os.environ.get("KADENCE_TOKEN", ""))
    if found and tls is None and not allow_insecure_token and not _core.is_local(endpoint):
        raise ConfigError(
            f"{origin}: would travel unencrypted to {endpoint}, which is not this machine; "
            "encrypt with tls=TLSConfig(...) (command line: --tls-ca FILE), or set allow_insecure_token=True"
        )
    authorization: Callable[[], _core.Pairs] = tuple
    if callable(found):
        authorization = lambda: _bearer(origin, found())  # noqa: E731
    elif found:
        pair = _bearer(origin, found)
        authorization = lambda: pair  # noqa: E731
    return _core.Settings(
        timeout=timeout,
        retry=retry or RetryConfig(),
        metadata=dict(metadata or {}),
        authorization=authorization,
        tls=tls is not None,
    )


def credentials(tls: TLSConfig | None) -> grpc.ChannelCredentials | None:
    """The credentials that `tls` describes, None for none. Raises ConfigError naming the file that cannot be used."""
    if tls is None:
        return None
    if (tls.client_certificate is None) != (tls.client_key is None):
        missing = "client_key" if tls.client_key is None else "client_certificate"
        raise ConfigError(f"tls.{missing}: is not set; a client certificate and its key go together")
    roots = _pem("tls.root_certificates", tls.root_certificates, _CERTIFICATE, "certificate")
    if roots is not None:
        _check_roots(_origin("tls.root_certificates", tls.root_certificates), roots)
    return grpc.ssl_channel_credentials(
        roots,
        _pem("tls.client_key", tls.client_key, _KEY, "private key"),
        _pem("tls.client_certificate", tls.client_certificate, _CERTIFICATE, "certificate"),
    )


def dial(module: Any, endpoint: str, found: grpc.ChannelCredentials | None, tls: TLSConfig | None) -> Any:
    """A channel of `module`, which is grpc or grpc.aio."""
    options = _core.channel_options(endpoint)
    if found is None:
        return module.insecure_channel(endpoint, options=options)
    if tls is not None and tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return module.secure_channel(endpoint, found, options=options)


def _bearer(origin: str, token: Any) -> _core.Pairs:
    if not isinstance(token, str) or not _TOKEN.match(token):
        raise ConfigError(f"{origin}: is not printable ASCII text without spaces")
    return (("authorization", f"Bearer {token}"),)


def _origin(name: str, source: Any) -> str:
    return name if isinstance(source, bytes) else f"{name}: {os.fspath(source)}"


def _pem(name: str, source: Any, form: re.Pattern[bytes], what: str) -> bytes | None:
    """The PEM text at a path, or given as bytes."""
    if source is None:
        return None
    if not isinstance(source, str | os.PathLike | bytes):
        raise ConfigError(f"{name}: {type(source).__name__}; a path, or PEM text as bytes")
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_origin(name, source)}: cannot be read: {error.strerror or error}") from error
    if not form.search(content):
        raise ConfigError(f"{_origin(name, source)}: holds no {what} in PEM form")
    return content


def _check_roots(origin: str, content: bytes) -> None:
    """gRPC would only say "failed to create handshaker", at each call, and that after writing to stderr."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{origin}: holds a damaged certificate ({error})") from error
