"""Runs one service as one process: `python -m services.<name> --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kadence.errors import KadenceError
from services.runtime import config, logs
from services.runtime.config import ServiceConfig


class Service(Protocol):
    """What a host, this one or Ray's, needs to know of a service."""

    address: str
    metrics_address: str

    async def start(self) -> str:
        """Begins to serve; returns the address."""

    async def drain(self, grace: float) -> None:
        """Takes no new work, gives running work `grace` seconds, stops."""

    async def health(self) -> bool:
        """Whether it does its work."""


def serve(
    factory: Callable[[Any], Service],
    section: str,
    config_class: type[ServiceConfig],
    argv: Sequence[str] | None = None,
) -> int:
    """The main function of a service process; returns its exit status.

    Prints "READY <service> <address> metrics=<address>" to stdout once it serves, and "http=<address>" behind it where
    the service has such a one. SIGTERM or SIGINT drains and exits 0, a second one exits at once. What is wrong with
    the configuration or checkpoint is one line and status 2.
    """
    arguments = _parser(section).parse_args(argv)
    try:
        overrides = dict(config.assignment(text) for text in arguments.set)
        settings = config.load(config_class, arguments.config, section, overrides)
        if arguments.print_config:
            print(config.show(settings, section), end="")
            return 0
        logs.setup(section, settings.log_level, settings.log_format)
        # Python threads hand over after 5 ms by default; a server beside a computing thread would answer that late.
        sys.setswitchinterval(0.0005)
        return asyncio.run(_run(factory, section, settings))
    except KadenceError as error:
        print(f"kadence: {error}", file=sys.stderr)
        return 2


def _parser(section: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m services.{section}", description=f"Runs one {section} replica.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; defaults without")
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one key; repeatable"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    return parser


async def _run(factory: Callable[[Any], Service], section: str, settings: ServiceConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    service = factory(settings)
    starting = asyncio.ensure_future(service.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    address = starting.result()
    http = f" http={service.http_address}" if hasattr(service, "http_address") else ""
    print(f"READY {section} {address} metrics={service.metrics_address}{http}", flush=True)
    await stopping
    await service.drain(settings.drain_seconds)
    return 0


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)
    stop.set()
