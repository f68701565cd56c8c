"""The command line: commands of the SDK itself, and those that installed packages add by entry point."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, NoReturn, TextIO

from kadence.commands import generate, status
from kadence.errors import APIError, ExtraMissingError, InvalidRequestError, KadenceError, UnavailableError

GROUP = "kadence.commands"
INSTALL = "pip install 'kadence[cluster]'"
OURS = ("kadence", "services", "deploy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    name = arguments[0] if arguments else ""
    try:
        args = _parser(name).parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KadenceError as error:
        return _complain(_explain(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OURS:
            raise
        return _complain(_missing(name, error))
    except KeyboardInterrupt:
        return _complain("cancelled", 130)
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line, and where to read on: the usage of all options would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kadence: {message} (see `{self.prog} --help`)\n")


def _parser(wanted: str) -> argparse.ArgumentParser:
    """The parser of all commands. Raises ExtraMissingError if the one `wanted` cannot be loaded."""
    parser = _Parser(prog="kadence", description="Speculative decoding as a cluster.")
    parser.add_argument("--version", action="version", version=f"kadence {version('kadence')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    generate.register(subparsers)
    status.register(subparsers)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            register = _load(entry)
        except ImportError as error:
            if entry.name == wanted:
                raise ExtraMissingError(_missing(entry.name, error)) from error
            subparsers.add_parser(entry.name, help=f"not installed: {INSTALL}", add_help=False)
        else:
            register(subparsers)
    return parser


def _load(entry: EntryPoint) -> Callable[[Any], None]:
    """The function that adds an entry's parser. An attribute that is absent counts as an import that failed."""
    try:
        register: Callable[[Any], None] = entry.load()
    except AttributeError as error:
        raise ImportError(str(error)) from error
    return register


def _missing(command: str, error: ImportError) -> str:
    return f"`kadence {command}` needs a package that is not installed ({error}): {INSTALL}"


def _explain(error: KadenceError) -> str:
    """One line for people."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnavailableError) and not error.answered:
        advice = "" if "TLS" in text else "; `kadence up` starts one"
        return f"the cluster cannot be reached ({text}){advice}"
    if isinstance(error, InvalidRequestError):
        return text
    if isinstance(error, APIError):
        request = f" [request {error.request_id}]" if error.request_id else ""
        advice = "; try again, or see `kadence status`" if isinstance(error, UnavailableError) else ""
        return f"{text} ({error.code}){request}{advice}"
    return text


def _complain(line: str, code: int = 1) -> int:
    print(f"kadence: {line}", file=sys.stderr, flush=True)
    return code


def _never_fail_to_encode(stream: TextIO) -> None:
    """A terminal that lacks a character shows "?" instead of breaking the answer off."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
