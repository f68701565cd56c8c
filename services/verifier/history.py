"""What sampling options need to know of one request's text, kept as it grows, and the edits of each row of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.model.edits import Edits
from services.verifier.sampling import Sampling


class History:
    """Counts a request's tokens once each, whoever committed them; drafted tokens count for the rows behind them."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        s = self._sampling = sampling
        self._start = self._counted = len(prompt)
        self._seen = Tally(prompt) if s.repetition_penalty != 1 else None
        self._produced = Tally(()) if s.presence_penalty or s.frequency_penalty else None
        self._tallies = [tally for tally in (self._seen, self._produced) if tally is not None]
        self._bad_words = BadWords(s.bad_words)
        self._stops = _ids(s.stop_token_ids) if s.min_tokens > 0 and s.stop_token_ids else None
        self._fixed = Edits(
            bias=(_ids(s.logit_bias), torch.tensor(list(s.logit_bias.values()))) if s.logit_bias else None,
            repetition=s.repetition_penalty,
            frequency=s.frequency_penalty,
            presence=s.presence_penalty,
            allowed=_ids(dict.fromkeys(s.allowed_token_ids)) if s.allowed_token_ids else None,
        )

    def edits(self, tokens: list[int], draft: list[int]) -> list[Edits | None]:
        """What changes in the row after `tokens` (prompt, then all that was committed), and after each of `draft`.

        The tensors hold until the next call.
        """
        self._add(tokens[self._counted :])
        self._counted = len(tokens)
        text = tokens[-self._bad_words.reach :]
        rows = [self._row(len(tokens), text)]
        for j, token in enumerate(draft, start=1):
            self._add([token])
            text.append(token)
            rows.append(self._row(len(tokens) + j, text))
        for tally in self._tallies:
            tally.take_back(draft)
        return rows

    def _add(self, tokens: list[int]) -> None:
        for tally in self._tallies:
            for token in tokens:
                tally.add(token)

    def _row(self, length: int, text: list[int]) -> Edits | None:
        edits = replace(
            self._fixed,
            seen=self._seen.ids if self._seen is not None else None,
            produced=(self._produced.ids, self._produced.counts) if self._produced else None,  # None if empty
            held=self._stops if length - self._start < self._sampling.min_tokens else None,
            banned=self._bad_words.after(text),
        )
        return edits if edits.any else None


class Tally:
    """Distinct ids in order of first appearance, and how often each came; what came last can be taken back."""

    def __init__(self, tokens: Iterable[int]) -> None:
        counts = Counter(tokens)
        room = [0] * 64
        self._slots = {token: slot for slot, token in enumerate(counts)}
        self._ids = np.array([*counts, *room], dtype=np.int64)
        self._counts = np.array([*counts.values(), *room], dtype=np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token: int) -> None:
        """Counts one token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def take_back(self, tokens: Sequence[int]) -> None:
        """Forgets `tokens`, the last ones that were counted."""
        for token in reversed(tokens):
            slot = self._slots[token]
            self._counts[slot] -= 1
            if self._counts[slot] == 0:
                del self._slots[token]

    @property
    def ids(self) -> Tensor:
        """The distinct ids, int64 [n]; a view that later tokens do not change, until what is in it is taken back."""
        return torch.from_numpy(self._ids[: len(self)])

    @property
    def counts(self) -> Tensor:
        """How often each of `ids` came, float32 [n]; a copy."""
        return torch.from_numpy(self._counts[: len(self)].copy())


class BadWords:
    """Sequences that may not be produced, found by the token before their last."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.reach = max((len(word) - 1 for word in words), default=0) or 1
        """Tokens of the text, at least 1, that decide what is excluded after it."""
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._always = _ids(self._single) if self._single else None
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def after(self, text: list[int]) -> Tensor | None:
        """Ids that would complete a word after `text`, which is not empty; None if there are none."""
        found = {last for before, last in self._by_last.get(text[-1], ()) if text[-len(before) :] == before}
        return _ids(self._single | found) if found else self._always


def _ids(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
