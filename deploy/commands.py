"""The command line's `kadence up` and `kadence down`."""

# Every `kadence` command loads this file to know its options; what needs Ray or psutil is imported when it runs.

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def up(subparsers: Any) -> None:
    """Adds the parser of `kadence up` (entry point of group kadence.commands)."""
    parser = subparsers.add_parser("up", help="start a cluster and wait until it serves")
    parser.add_argument("-f", "--file", metavar="TOML", help="configuration; defaults without")
    parser.add_argument("--policy", metavar="NAME", help='how many drafted tokens are verified: "off" or "fixed:K"')
    parser.add_argument(
        "--drafter",
        metavar="KIND",
        help='"dflash2" or "dflash" (--set drafter.options.checkpoint=FOLDER), "ngram" or "none"; '
        'without: the one shipped for the model, else "ngram"',
    )
    parser.add_argument("--model", metavar="PATH", help="model folder, or a name that `kadence models list` shows")
    parser.add_argument(
        "--transport", choices=("ray", "grpc", "inproc"), help="Ray (default), plain processes, or one process"
    )
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="any configuration key; repeatable"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.set_defaults(run=run_up)


def down(subparsers: Any) -> None:
    """Adds the parser of `kadence down` (entry point of group kadence.commands)."""
    parser = subparsers.add_parser("down", help="stop the cluster that `kadence up` started, and remove its files")
    parser.set_defaults(run=run_down)


def run_up(args: argparse.Namespace) -> int:
    """Starts a cluster. Raises KadenceError."""
    from deploy import cluster
    from deploy.config import load_plan, show_plan
    from deploy.placement import StartError
    from services.runtime.config import assignment

    overrides = dict(assignment(text) for text in args.set)
    named = {
        "policy.name": args.policy,
        "drafter.kind": args.drafter,
        "model.path": args.model,
        "cluster.transport": args.transport,
    }
    plan = load_plan(args.file, overrides | {key: value for key, value in named.items() if value is not None})
    if args.print_config:
        print(show_plan(plan), end="")
        return 0
    stop_on_sigterm()
    try:
        record = cluster.up(plan, progress())
    except StartError as error:
        # A service that explains itself in one line is quoted in the error already.
        if error.log.removeprefix("kadence: ") not in str(error):
            print(error.log, file=sys.stderr)
        raise
    print(f"Serving at {record['endpoint']}. Try: kadence generate --chat --prompt 'Why is the sky blue?'")
    if record["http"]:
        print(f"OpenAI-compatible HTTP API at http://{record['http']}/v1")
    print(f"Logs: {record['log_dir'] or 'with Ray'}. Stop with: kadence down")
    return 0


def run_down(args: argparse.Namespace) -> int:
    """Stops the cluster; fine if there is none. Raises ConfigError for a damaged record."""
    from deploy import cluster

    print("The cluster is down." if cluster.down(progress()) else "No cluster is running.")
    return 0


def stop_on_sigterm() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that what it started is undone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def progress() -> Callable[[str], None]:
    """A function that prints one line with the seconds since now."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say
