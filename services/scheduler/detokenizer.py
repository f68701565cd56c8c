"""Turns the ids of one answer into text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one answer. All text it gave, `flush` included, is `decode(all ids)`.

    (But for decoders with byte fallback, which take back good characters when bad bytes follow them; that cannot be
    done to text already sent.)

    What has been shown depends on the ids alone and not on how they were grouped, so a stream can be resumed by
    feeding it the ids that its client holds.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Ids from the last but one point where the text ended with a whole character. One settled segment stays in
        # front, because some decoders treat the start of a text in a special way (they drop a leading space).
        self._window: list[int] = []
        self._settled = 0
        self._shown = 0
        """Characters of the window's text that were given out."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._window += ids
        text = self._decode(self._window)
        # A character whose bytes are not all there decodes to replacement characters at the end.
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._shown :]
        if not new:
            return ""
        if len(whole) == len(text):
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = len(self._decode(self._window))
        else:
            self._shown = len(whole)
        return new

    def flush(self) -> str:
        """The text held back, now that no more ids will come."""
        return self._decode(self._window)[self._shown :]
