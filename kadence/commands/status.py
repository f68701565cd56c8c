"""`kadence status`: the cluster's replicas, load and policy, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from kadence import ClusterStatus, ReplicaStatus
from kadence.commands import connection

_HEADER = (
    "KIND",
    "STATE",
    "ADDRESS",
    "SERVES",
    "RUNNING",
    "WAITING",
    "KV PAGES",
    "ACCEPTANCE",
    "DRAFTER",
    "PID",
    "METRICS",
    "HTTP",
)


def register(subparsers: Any) -> None:
    """Adds the parser of `kadence status`."""
    parser = subparsers.add_parser("status", help="show the cluster's replicas, load and policy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds to wait for the answer (default 10)")
    connection.add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks once and prints. Raises KadenceError."""
    with connection.connect(args) as client:
        status = client.status(timeout=args.timeout)
    print(json.dumps(dataclasses.asdict(status)) if args.json else table(status))
    return 0


def table(status: ClusterStatus) -> str:
    """The snapshot for people: a line of totals, then a row per replica."""
    rows = [_HEADER, *(_row(replica) for replica in status.replicas)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    total = (
        f"policy {status.policy} (epoch {status.policy_epoch}); "
        f"{status.requests_in_flight} in flight, {status.requests_queued} queued"
    )
    problems = [f"{r.kind} {r.replica_id}: {r.drafter_problem}" for r in status.replicas if r.drafter_problem]
    return "\n".join([total, "", *(_line(row, widths) for row in rows), *([""] if problems else []), *problems])


def _row(replica: ReplicaStatus) -> tuple[str, ...]:
    pages = f"{replica.kv_pages_used}/{replica.kv_pages_total}" if replica.kv_pages_total else "-"
    acceptance = f"{replica.stats.acceptance_length:.2f}" if replica.stats.steps else "-"
    return (
        replica.kind,
        replica.state,
        replica.address,
        replica.serves or "-",
        str(replica.running),
        str(replica.waiting),
        pages,
        acceptance,
        replica.drafter or "-",
        str(replica.pid) if replica.pid else "-",
        replica.metrics_address or "-",
        replica.http_address or "-",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
