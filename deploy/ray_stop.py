"""Takes our applications off Ray Serve; a process of its own, so that a Ray that hangs can be given up on."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy import ray_head
from deploy.ray_app import APPLICATION


def main(argv: list[str]) -> int:
    """Arguments: Ray's address, its temporary folder or "", and "serve" if the Serve instance is to go too."""
    address, temp, whole = argv
    ray = ray_head.connect(address, Path(temp) if temp else None)
    from ray import serve

    running = set(serve.status().applications)
    # The scheduler brings the work, so it is drained first.
    for kind in ("scheduler", "verifier", "drafter"):
        if APPLICATION.format(kind) in running:
            serve.delete(APPLICATION.format(kind))
    if whole == "serve":
        serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
