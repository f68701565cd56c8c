"""What the commands have in common: the machine they compute on, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from kadence.errors import ConfigError, KadenceError


def ended(work: Callable[[], None], stopped: str = "stopped") -> int:
    """Exit status of a command whose work is done here; errors, and `stopped` after Ctrl-C, are told in one line."""
    try:
        work()
    except (KadenceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    return 0


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `machine` reads."""
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument(
        "--threads", type=int, default=0, help="compute threads, which decide roundings; 0 is torch's choice"
    )


def machine(args: argparse.Namespace) -> torch.device:
    """Sets the number of threads and returns the device. Raises ConfigError if one of them cannot be had."""
    if args.threads < 0:
        raise ConfigError(f"--threads is {args.threads}; at least 0 is needed")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises where it was built without CUDA
        raise ConfigError(f"--device is {args.device!r}: {str(error).splitlines()[0]}") from None
