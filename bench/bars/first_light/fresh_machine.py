"""The newcomer's two commands: `make demo` and `make test` in a fresh clone of the commit, with an empty home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.machine import ROOT
from deploy.processes import tail

MINUTES = 15
# Minutes. The demo's limit is for after the packages are downloaded; here the download is counted too.
LIMITS = {"demo": 10, "test": 15}
CACHES = ("models", "kernels")  # may stay in the home
# What a user wants to keep: fetched models, compiled kernels.
_CACHES = ("models", "kernels")
# What would lead the commands back to this environment instead of their own.
_FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "KADENCE_", "OMP_", "GOMP_", "XDG_", "RAY_", "MAKE")


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per command, and one for what they leave. A try-out has no time for that and says so."""
    if bench.quick:
        yield Bar("commands tried", 0, note="too long for a try-out")
        return
    with tempfile.TemporaryDirectory(prefix="kadence-fresh-") as folder:
        clone, home, log = Path(folder) / "kadence", Path(folder) / "home", Path(folder) / "log"
        home.mkdir()
        _clone(clone)
        yield _bar(bench, "demo", clone, home, log)
        kept = sorted(path.name for path in (home / ".kadence").iterdir())
        left = [str(process.pid) for process in psutil.process_iter() if _at_home(process, home)]
        wrong = [*left, *(name for name in kept if name not in _CACHES)]
        yield Bar("processes and files left by the demo", len(wrong), "<=", 0, note=" ".join(wrong))
        yield _bar(bench, "test", clone, home, log)


def _clone(folder: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)


def _bar(bench: Bench, target: str, clone: Path, home: Path, log: Path) -> Bar:
    """Minutes that `make TARGET` took; not measured if it failed."""
    bench.say(f"make {target}")
    begun = time.monotonic()
    command = ["make", "--no-print-directory", target]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=clone,
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            if process.poll() is None:  # we are being stopped, and with us whatever it runs
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    minutes = (time.monotonic() - begun) / 60
    end = tail(log, 1)
    bench.say(f"make {target}: exit status {status} after {minutes:.1f} minutes; {end}")
    name = f"make {target} in a fresh clone"
    samples = {"log": tail(log, 60), "status": status}
    if status:
        return Bar(name, None, limit=LIMITS[target], note=f"exit status {status}: {end}", samples=samples)
    return Bar(name, minutes, "<=", LIMITS[target], unit="min", note=end, samples=samples)


def _at_home(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # ended meanwhile, or another user's
        return False


def _environment(home: Path) -> dict[str, str]:
    """This environment without what belongs to this checkout's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    ours = str(Path(sys.executable).parent)
    path = os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part != ours)
    # The interpreter itself, since a version manager's shim may look for it in the home.
    interpreter = str(Path(sys.executable).resolve())
    return {**kept, "HOME": str(home), "PATH": path, "PYTHON": interpreter}
