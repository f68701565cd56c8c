"""Host and port, joined, split and found free."""

from __future__ import annotations

import errno
import socket

from kadence.errors import ConfigError

_WILDCARDS = ("0.0.0.0", "::", "[::]")


def join(host: str, port: int) -> str:
    """ "host:port", an IPv6 host in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def advertised(host: str, advertise: str, port: int) -> str:
    """The address peers dial. Raises ConfigError if only a wildcard is known."""
    if not advertise and host in _WILDCARDS:
        raise ConfigError(f"advertise: must be set when host is {host}, peers cannot dial a wildcard")
    return join(advertise or host, port)


def free(key: str, host: str, port: int) -> None:
    """Checks that host:port can be bound; asked first because gRPC itself prints pages when it cannot.

    Raises ConfigError naming `key` and the address.
    """
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((bare, port))
            if port:
                probe.listen(1)  # two sockets may both bind with SO_REUSEADDR, only one may listen
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror or error}"
        raise ConfigError(f"{key}: {join(host, port)} {reason}") from error
