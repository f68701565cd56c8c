"""The acceptance rules: which tokens of a draft stand, and the one token that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile

import numpy as np
import torch
from torch import Tensor

from services.kernels.noise_ref import ACCEPT, RESIDUAL, key_tensor, noise_key, uniform
from services.model.probs import RowLaw, draw, draw_from, log_laws
from services.verifier.draft import Draft


@dataclass(frozen=True)
class Trial:
    """One request's sampled rows of a step: x1..xK, and the laws of the K + 1 tokens after x1..xj-1.

    Without `noise` the rule is `match`; else it is `ratio`, with noise of this seed, attempt and round. A prompt that
    goes on has no laws.
    """

    draft: Draft
    laws: list[RowLaw]
    noise: tuple[int, int, int] | None = None


def judge(logits: Tensor, trials: list[Trial]) -> list[list[int]]:
    """The tokens to commit for each trial: what is accepted of its draft, and one more; nothing where it has no laws.

    `logits` [s, V] holds the rows of all trials, in their order.
    """
    ends = list(accumulate(len(trial.laws) for trial in trials))
    verdicts: list[list[int]] = [[] for _ in trials]
    for rule, named in ((_by_match, False), (_by_ratio, True)):
        mine = [i for i, trial in enumerate(trials) if trial.laws and (trial.noise is not None) is named]
        if mine:
            rows = [row for i in mine for row in range(ends[i] - len(trials[i].laws), ends[i])]
            found = rule(_rows(logits, rows), [trials[i] for i in mine])
            for i, tokens in zip(mine, found, strict=True):
                verdicts[i] = tokens
    return verdicts


def match(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens of the draft x1..xK are accepted: those that equal the target's own choice.

    `chosen` holds the target's own K + 1 tokens, the j-th drawn after x1..xj-1 with the noise of its position. The
    accepted prefix and the token after it are chosen[: accepted + 1]: exactly what decoding one by one would give.
    """
    assert len(chosen) == len(draft) + 1, "one row per drafted token and one for the bonus"
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted


def _by_match(logits: Tensor, trials: list[Trial]) -> list[list[int]]:
    """Greedy rows all at once; a sampled row, which costs much more, only if the draft stands up to it."""
    starts = list(accumulate((len(trial.laws) for trial in trials), initial=0))[:-1]
    verdicts: list[list[int]] = [[] for _ in trials]
    greedy = [i for i, trial in enumerate(trials) if all(law.temperature == 0 for law in trial.laws)]
    if greedy:
        rows = [starts[i] + k for i in greedy for k in range(len(trials[i].laws))]
        tokens = iter(draw(_rows(logits, rows), [law for i in greedy for law in trials[i].laws]))
        for i in greedy:
            chosen = list(islice(tokens, len(trials[i].laws)))
            verdicts[i] = chosen[: match(trials[i].draft.token_ids, chosen) + 1]
    depth, standing = 0, sorted(set(range(len(trials))) - set(greedy))
    while standing:
        tokens = iter(
            draw(_rows(logits, [starts[i] + depth for i in standing]), [trials[i].laws[depth] for i in standing])
        )
        for i in standing:
            verdicts[i].append(next(tokens))
        standing = [i for i in standing if trials[i].draft.token_ids[depth : depth + 1] == verdicts[i][-1:]]
        depth += 1
    return verdicts


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _by_ratio(logits: Tensor, trials: list[Trial]) -> list[list[int]]:
    """Token by token (Leviathan 2023, Chen 2023): x stands with probability min(1, p(x) / q(x)).

    The first that does not is replaced by a draw from max(p - q, 0), normalised; if all stand, one more comes from p.
    Exact if whether x_k is verified was decided before x_k was drawn, and x_k was drawn from q with other noise.
    """
    table = log_laws(logits, [law for trial in trials for law in trial.laws])
    starts = list(accumulate((len(trial.laws) for trial in trials), initial=0))[:-1]
    counts = _accepted(table, trials, starts)
    last = table[[start + count for start, count in zip(starts, counts, strict=True)]]
    refused = [i for i, trial in enumerate(trials) if counts[i] < len(trial.draft)]
    if refused:
        last[refused] = _residual(last[refused], [_law(trials[i].draft, counts[i]) for i in refused])
    more = draw_from(last, [_key(trial, count + 1, RESIDUAL) for trial, count in zip(trials, counts, strict=True)])
    return [[*trial.draft.token_ids[:count], token] for trial, count, token in zip(trials, counts, more, strict=True)]


def _accepted(table: Tensor, trials: list[Trial], starts: list[int]) -> list[int]:
    """How many tokens of each draft stand; `table` [s, V] is log p, a trial's rows begin at its start."""
    rows = [start + k for trial, start in zip(trials, starts, strict=True) for k in range(len(trial.draft))]
    if not rows:
        return [0] * len(trials)
    p = table[rows, [token for trial in trials for token in trial.draft.token_ids]].exp()
    q = torch.from_numpy(np.concatenate([_proposed(trial.draft) for trial in trials])).to(table.device)
    keys = [_key(trial, slot, ACCEPT) for trial in trials for slot in range(1, len(trial.draft) + 1)]
    u = uniform(key_tensor(keys), torch.zeros(1, 1, dtype=torch.int32))[:, 0].to(table.device)
    stands = (u * q < p).tolist()
    counts, row = [], 0
    for trial in trials:
        counts.append(sum(1 for _ in takewhile(bool, stands[row : row + len(trial.draft)])))
        row += len(trial.draft)
    return counts


def _proposed(draft: Draft) -> np.ndarray:
    """q(x_k) of each drafted token, float32 [n]."""
    if draft.q is None:
        return np.ones(len(draft), np.float32)
    hit = draft.q.ids == np.array(draft.token_ids, np.int32)[:, None]
    found: np.ndarray = np.where(hit, draft.q.probabilities, np.float32(0)).sum(axis=1, dtype=np.float32)
    return found


def _law(draft: Draft, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates and probabilities that the draft's token at index k was drawn from."""
    if draft.q is None:
        return np.array([draft.token_ids[k]]), np.ones(1, np.float32)
    return draft.q.ids[k], draft.q.probabilities[k]


def _residual(table: Tensor, laws: list[tuple[np.ndarray, np.ndarray]]) -> Tensor:
    """log p [s, V] -> log max(p - q, 0); where nothing is left (only rounding refuses such a token), log p itself."""
    width = max(len(ids) for ids, _ in laws)
    # Shorter rows are filled up with their first candidate, which is then written twice, the same.
    columns = np.stack([np.concatenate([ids, np.full(width - len(ids), ids[0])]) for ids, _ in laws])
    q = np.stack([np.concatenate([q, np.full(width - len(q), q[0])]) for _, q in laws])
    at = torch.from_numpy(columns.astype(np.int64)).to(table.device)
    left = (table.gather(1, at).exp() - torch.from_numpy(q).to(table.device)).clamp_(min=0).log_()
    residual = table.scatter(1, at, left)
    nothing = residual.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.where(nothing, table, residual)


def _key(trial: Trial, slot: int, stream: int) -> tuple[int, int]:
    assert trial.noise is not None
    return noise_key(*trial.noise, slot, stream)
