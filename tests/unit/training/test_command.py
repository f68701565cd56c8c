"""How commands end: their status, and one line where something was wrong."""

from __future__ import annotations

import pytest

from kadence.errors import ConfigError
from training.command import ended


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, 0, ""),
        (ConfigError("--x is 1"), 1, "error: --x is 1\n"),
        (OSError("no space"), 1, "error: no space\n"),
        (KeyboardInterrupt(), 130, "stopped; go on\n"),
    ],
)
def test_ended(error: BaseException | None, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        if error:
            raise error

    assert ended(work, "stopped; go on") == status and capsys.readouterr().err == told
    with pytest.raises(ZeroDivisionError):
        ended(lambda: print(1 // 0))
