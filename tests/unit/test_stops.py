"""Stop strings end the text before them, wherever tokens are cut; what might become one is held back, and let go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.scheduler.answer import Answer
from services.scheduler.stops import StopScanner
from services.scheduler.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    scanner, shown = StopScanner(stops), []
    for piece in pieces:
        text, match = scanner.feed(piece)
        shown.append(text)
        if match is not None:
            return shown, match
    return [*shown, scanner.flush()], None


def test_across_pieces() -> None:
    assert run(("STOP",), ["ab S", "TO", "P c"]) == (["ab ", "", ""], "STOP")


def test_held_back_text_is_let_go() -> None:
    assert run(("STOP",), ["a ST", "x", "STO"]) == (["a ", "STx", "", "STO"], None)


def test_a_match_may_begin_inside_a_failed_one() -> None:
    assert run(("aab",), ["aa", "ab!"]) == (["", "a"], "aab")


def test_first_to_be_complete_wins_then_the_longer() -> None:
    assert run(("bcd", "c"), ["abcd"]) == (["ab"], "c")
    assert run(("c", "bc"), ["abcd"]) == (["a"], "bc")
    assert run(("d", "zz"), ["zabdzz"]) == (["zab"], "d")


def test_without_stops_text_passes() -> None:
    assert run((), ["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.parametrize("seed", range(50))
def test_against_plain_search(seed: int) -> None:
    """Any cut gives the text before the occurrence that ends first, and holds back no more than it must."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(40))
    stops = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(3, 8))) for _ in range(rng.randrange(1, 4)))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    cuts = sorted(rng.sample(range(1, 40), k=rng.randrange(1, 30)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
    shown, match = run(stops, pieces)
    assert "".join(shown) == expected
    assert match == (min(ends)[2] if ends else None)
    scanner, fed, given = StopScanner(stops), "", ""
    for piece in pieces:
        fed += piece
        part, match = scanner.feed(piece)
        if match:
            break
        given += part
        kept = fed[len(given) :]
        assert not kept or any(stop.startswith(kept) for stop in stops)


def test_a_match_that_does_not_count_is_text() -> None:
    def scan(*pieces: tuple[str, bool], stop: str = "abab") -> tuple[str, str | None]:
        scanner, shown, match = StopScanner((stop,)), "", None
        for text, counts in pieces:
            part, match = scanner.feed(text, counts=counts)
            shown += part
        return shown + scanner.flush(), match

    assert scan(("abab", False), ("x", True)) == ("ababx", None)
    assert scan(("xab", False), ("ab", True)) == ("x", "abab")  # it may begin before it counts
    assert scan(("abab", False), ("ab", True)) == ("ab", "abab")  # and overlap with one that did not
    assert scan(("aa", False), ("b", False), ("aaa", True), stop="aa") == ("aab", "aa")


@pytest.mark.parametrize("seed", range(50))
def test_min_tokens_against_plain_search(tokenizer: Tokenizer, seed: int) -> None:
    """The stop string that ends first, among those that end with a later token than the `min_tokens`-th."""
    rng = random.Random(seed)
    ids = tokenizer.encode("".join(rng.choice(["a", "b", "the ", "日"]) for _ in range(30)))
    stops = tuple({"".join(rng.choice("ab日") for _ in range(rng.randrange(1, 4))) for _ in range(2)})
    least = rng.randrange(len(ids))
    early = len(tokenizer.decode(ids[:least]).rstrip("\ufffd"))  # characters that are complete by then
    text = tokenizer.decode(ids)
    ends = sorted(
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > early
    )
    expected = text[: ends[0][0] + ends[0][1]] if ends else text
    for size in (1, 3, len(ids)):
        answer, shown = Answer(tokenizer.detokenizer(), stops, least), ""
        for start in range(0, len(ids), size):
            shown += answer.feed(ids[start : start + size])[1]
            if answer.stop_match is not None:
                break
        assert shown + answer.finish() == expected
        assert answer.stop_match == (ends[0][2] if ends else None)
        assert len(answer.token_ids) > least


def test_the_answer_ends_with_the_token_that_completes_the_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wor|stop here| and more")
    answer = Answer(tokenizer.detokenizer(), ("|stop",))
    kept, text = answer.feed(ids)
    assert text == "hello wor" and answer.stop_match == "|stop" and answer.finish() == ""
    assert answer.token_ids == ids[:kept]
    assert "|stop" in tokenizer.decode(ids[:kept]) and "|stop" not in tokenizer.decode(ids[: kept - 1])


def test_the_answer_is_the_same_however_many_tokens_a_step_commits(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox | jumps | over")
    results = set()
    for size in (1, 2, 3, 100):
        answer, text = Answer(tokenizer.detokenizer(), (" | over", "x")), ""
        for start in range(0, len(ids), size):
            text += answer.feed(ids[start : start + size])[1]
            if answer.stop_match:
                break
        results.add((text + answer.finish(), tuple(answer.token_ids), answer.stop_match))
    assert len(results) == 1
    assert next(iter(results))[0] == "the fo"


def test_a_stop_id_is_a_token_but_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello.")
    for stops in ((), ("zzz",)):
        answer = Answer(tokenizer.detokenizer(), stops)
        kept, text = answer.feed(ids, last_is_stop_id=True)
        assert kept == len(ids) and answer.token_ids == ids
        assert text + answer.finish() == "hello"


def test_what_is_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello sto")
    answer = Answer(tokenizer.detokenizer(), ("stop",))
    text = answer.feed(ids)[1]
    assert text == "hello " and answer.finish() == "sto"
