"""Every record carries the request id, as text or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from services.runtime import logs


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    token = logs.request_id.set("r-7")
    yield
    logs.request_id.reset(token)
    root.handlers[:], root.level = handlers, level


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("drafter", "warning")
    logging.getLogger("x").info("not shown")
    logging.getLogger("x").warning("took %d", 3)
    line = capsys.readouterr().err
    assert line.endswith(" WARNING drafter r-7 took 3\n") and line.count("\n") == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("drafter", "debug", "json")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("x").exception("failed\nbadly")
    entry = json.loads(capsys.readouterr().err)
    assert (entry["service"], entry["request_id"], entry["message"]) == ("drafter", "r-7", "failed\nbadly")
    assert "ValueError: why" in entry["traceback"]
