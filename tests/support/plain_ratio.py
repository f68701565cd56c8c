"""Rule `ratio` once more, by definition: a model's logits, a scripted drafter's tokens and laws, and numpy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kadence.internal import common_pb2
from kadence.internal import drafter_pb2 as pb
from tests.support import noise
from tests.support.plain_sampling import NEAR, Logits, Options, Plain, edited, likely_enough
from tests.support.scripted_drafter import ScriptedDrafter

ACCEPT, RESIDUAL = 2, 3
Law = dict[int, float]
"""Token -> probability; all others have none."""
Propose = Callable[[list[int], int], tuple[list[int], list[Law] | None]]
"""(tokens so far, most wanted) -> draft, and what each of its tokens was drawn from; None for one-hot."""


class LawDrafter(ScriptedDrafter):
    """A scripted drafter that says what its tokens were drawn from."""

    def __init__(self, propose: Propose) -> None:
        self._laws: dict[str, list[Law] | None] = {}

        def remember(name: str, tokens: list[int], most: int) -> list[int]:
            draft, self._laws[name] = propose(tokens, most)
            return draft

        super().__init__(remember)

    def answer(self, response: pb.DraftResponse) -> None:
        """Adds the laws."""
        for draft in response.drafts:
            laws = self._laws[draft.stamp.request_id]
            if laws:
                ids = np.array([list(law) for law in laws], np.int32)
                q = np.array([list(law.values()) for law in laws], np.float32)
                draft.q.token_ids.CopyFrom(_tensor(ids, common_pb2.DTYPE_INT32))
                draft.q.probabilities.CopyFrom(_tensor(q, common_pb2.DTYPE_FLOAT32))
        super().answer(response)


def _tensor(values: np.ndarray, dtype: common_pb2.Dtype) -> common_pb2.Tensor:
    return common_pb2.Tensor(dtype=dtype, shape=values.shape, data=values.tobytes())


def drafts(logits: Logits, vocab: int, candidates: int, seed: int) -> Propose:
    """Drafts near the model's own law: each token from `candidates` likely ids (0: one-hot), a function of the text."""

    def propose(tokens: list[int], most: int) -> tuple[list[int], list[Law] | None]:
        rng = random.Random(f"{seed} {tokens}")
        draft: list[int] = []
        laws: list[Law] = []
        for _ in range(most):
            near = logits(tokens + draft)
            ids = np.argsort(-near, kind="stable")[: max(candidates, 1)].tolist()
            if candidates:
                q = np.exp(near[ids] - near[ids].max()) * [rng.uniform(0.3, 3) for _ in ids]
                law = dict(zip(ids, (q / q.sum()).astype(np.float32).tolist(), strict=True))
                draft.append(rng.choices(ids, list(law.values()))[0])
                laws.append(law)
            else:
                draft.append(ids[0] if rng.random() < 0.7 else rng.randrange(vocab))
        return draft, laws or None

    return propose


def decode(
    logits: Logits,
    prompt: list[int],
    count: int,
    options: dict[str, Any],
    propose: Propose,
    k: int,
    attempt: int = 0,
    committed: tuple[int, ...] = (),
) -> Plain:
    """At most `count` tokens, `committed` included, ending with the first stop id; the first round drafts nothing."""
    o, tokens, table, clear, turn = Options(**options), list(committed), [], True, 0

    def law(drafted: list[int]) -> tuple[np.ndarray, np.ndarray, bool]:
        """(log-softmax of the model's own logits, p, whether p is clear) after the tokens and `drafted`."""
        answer = tokens + drafted
        raw = logits(prompt + answer).astype(np.float64)
        left, sharp = likely_enough(edited(raw, prompt, answer, o), o)
        ids, kept = noise.survivors(left, o.temperature, o.top_k, o.top_p)
        p = np.zeros(len(raw))
        p[ids] = kept
        return raw - raw.max() - np.log(np.exp(raw - raw.max()).sum()), p, sharp

    while len(tokens) < count and not (len(tokens) > len(committed) and tokens[-1] in o.stop):
        most = min(k, count - len(tokens) - 1) if turn else 0
        draft, laws = propose(prompt + tokens, most) if most > 0 else ([], None)
        produced: list[int] = []
        for slot in range(1, len(draft) + 2):
            raw, p, sharp = law(draft[: slot - 1])
            clear = clear and sharp
            table.append(raw)
            weights = p
            if slot <= len(draft):
                x = draft[slot - 1]
                q = laws[slot - 1] if laws else {x: 1.0}
                u = noise.uniform(o.seed, attempt, np.array([0]), turn, slot, ACCEPT)[0]
                clear = clear and abs(u * q[x] - p[x]) > NEAR * q[x]
                if u * q[x] < p[x]:
                    produced.append(x)
                    continue
                weights = np.maximum(p - [q.get(token, 0.0) for token in range(len(p))], 0)
            ids = weights.nonzero()[0]
            score = np.log(weights[ids]) + noise.gumbel(o.seed, attempt, ids, turn, slot, RESIDUAL)
            best = np.sort(score)[::-1]
            # Where little is left, it is a difference of nearly equal numbers.
            clear = clear and (len(ids) == 1 or best[0] - best[1] > NEAR / min(1, weights.sum()))
            produced.append(int(ids[score.argmax()]))
            break
        for token in produced:
            if len(tokens) < count and not (len(tokens) > len(committed) and tokens[-1] in o.stop):
                tokens.append(token)
        turn += 1
    new = tokens[len(committed) :]
    return Plain(prompt, new, table[: len(new)], clear)
