"""Where computing happens, and with how many threads."""

from __future__ import annotations

import threading

import pytest

from services.model.linear import padded
from services.runtime import threads


def test_in_passing_runs_in_a_thread_that_ends() -> None:
    thread = threads.in_passing(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_in_passing_raises_what_the_function_raises() -> None:
    def fail() -> None:
        raise LookupError("why")

    with pytest.raises(LookupError, match="why"):
        threads.in_passing(fail)


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("", None), ("0", None), ("many", None)])
def test_available_follows_the_environment(value: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5})
    assert threads.available() == (expected or 3)


def test_padded_rows_are_few_and_waste_little() -> None:
    for rows in range(1, 5000):
        size = padded(rows)
        assert rows <= size == padded(size)
        assert size - rows <= max(0, rows // 4)
    assert len({padded(rows) for rows in range(1, 513)}) <= 32
