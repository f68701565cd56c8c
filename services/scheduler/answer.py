"""One answer as it grows: ids in, ids and text out, ended by a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.detokenizer import Detokenizer
from services.scheduler.stops import StopScanner


class Answer:
    """What is known of an answer; every step's tokens pass through `feed`, and `finish` gives the held-back rest.

    A stop string counts if a later token than the `min_tokens`-th completes it.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self._scans = bool(stops)
        self.token_ids: list[int] = []
        """All tokens, those that a resumed stream brought along included."""
        self.stop_match: str | None = None
        """The stop string that ended it; it is not in the text, its tokens are in `token_ids`."""

    def feed(self, ids: Sequence[int], *, last_is_stop_id: bool = False) -> tuple[int, str]:
        """(how many of `ids` belong to the answer, the text they complete).

        Fewer than all belong to it only when a stop string was completed. A stop id at the end is a token of the
        answer but no text.
        """
        assert self.stop_match is None, "fed after its end"
        spoken = ids[:-1] if last_is_stop_id else ids
        if not self._scans:
            self.token_ids += ids
            return len(ids), self._detokenizer.feed(spoken)
        shown = []
        early = self._min_tokens - len(self.token_ids)
        for count, token in enumerate(spoken, 1):
            text, self.stop_match = self._scanner.feed(self._detokenizer.feed((token,)), counts=count > early)
            shown.append(text)
            if self.stop_match is not None:
                self.token_ids += ids[:count]
                return count, "".join(shown)
        self.token_ids += ids
        return len(ids), "".join(shown)

    def finish(self) -> str:
        """The text held back until the end was known."""
        if self.stop_match is not None:
            return ""
        text, _ = self._scanner.feed(self._detokenizer.flush())
        return text + self._scanner.flush()
