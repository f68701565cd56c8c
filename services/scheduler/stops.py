"""Finds stop strings in text that arrives in pieces, and holds back what might become one."""

from __future__ import annotations


class StopScanner:
    """Passes text through until a stop string is complete.

    The first string to be complete wins; of two that end together, the longer. Both depend on the text alone and not
    on how it was cut, so the answer is the same however many tokens a step commits.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that is complete or None); nothing is fed after a match.

        Where it does not count (it is too early to stop), a string that `text` completes is text like any other; one
        that only begins there is found as usual.
        """
        if not self._patterns:
            return text, None
        buffer = self._held + text
        start = len(self._held)
        for end, char in enumerate(text, start + 1):
            matched = None
            for pattern in self._patterns:
                if pattern.step(char) and counts and matched is None:
                    matched = pattern.text  # sorted by length, so the first is the longest
            if matched is not None:
                self._held = ""
                return buffer[: end - len(matched)], matched
        keep = max(pattern.state for pattern in self._patterns)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth, Morris and Pratt's automaton: constant time a character, whatever the text does."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        """Length of the longest prefix of `text`, but for `text` itself, that the input ends with."""
        self._failure = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._failure[length - 1]
            length += text[index] == text[length]
            self._failure[index] = length

    def step(self, char: str) -> bool:
        """Takes one character; whether the input now ends with `text`."""
        state, text = self.state, self.text
        while state and text[state] != char:
            state = self._failure[state - 1]
        state += text[state] == char
        complete = state == len(text)
        self.state = self._failure[-1] if complete else state
        return complete
