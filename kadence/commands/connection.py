"""The flags that say which cluster a command talks to, and how."""

from __future__ import annotations

import argparse
from typing import Any

from kadence import Client, TLSConfig


def add_flags(parser: Any) -> None:
    """Adds them. A token has no flag: other users see the command lines of this machine."""
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="default: $KADENCE_ENDPOINT, or the local cluster; a token is taken from $KADENCE_TOKEN",
    )
    parser.add_argument("--tls", action="store_true", help="encrypt, trusting the usual authorities")
    parser.add_argument("--tls-ca", metavar="FILE", help="encrypt, trusting the authorities of this PEM file")
    parser.add_argument("--tls-cert", metavar="FILE", help="our certificate, for servers that ask")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key")
    parser.add_argument("--tls-name", metavar="NAME", help="name in the certificate, if not the host")


def connect(args: argparse.Namespace) -> Client:
    """The client that the flags describe. Raises ConfigError."""
    wanted = args.tls or any((args.tls_ca, args.tls_cert, args.tls_key, args.tls_name))
    tls = TLSConfig(args.tls_ca, args.tls_cert, args.tls_key, args.tls_name or "") if wanted else None
    return Client(args.endpoint, tls=tls)
