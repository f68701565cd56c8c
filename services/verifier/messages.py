"""The verifier's edge: protobuf messages in, plain types out, and back."""

from __future__ import annotations

import numpy as np
import torch

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2, control_pb2, drafter_pb2, verifier_pb2
from kadence.types import Rule
from kadence.v1 import types_pb2
from services.runtime import tensors
from services.verifier.allocation import Policy
from services.verifier.draft import Draft, SparseLaw
from services.verifier.features import RowSlice
from services.verifier.outcomes import EngineLoad, Update
from services.verifier.request import FinishReason, Request, Terminal
from services.verifier.sampling import Sampling, check

RULES: dict[Rule, types_pb2.Rule] = {"match": types_pb2.RULE_MATCH, "ratio": types_pb2.RULE_RATIO}
_RULES = {number: name for name, number in RULES.items()}
DTYPES = {torch.float32: common_pb2.DTYPE_FLOAT32, torch.bfloat16: common_pb2.DTYPE_BFLOAT16}
"""Element types of feature rows and of what makes them, on the wire."""
_SUM_TOLERANCE = 1e-3  # of the probabilities of one position
_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: types_pb2.FINISH_REASON_FAILED,
}


def stamp_of(request: Request) -> common_pb2.Stamp:
    """Names the request as it stands now."""
    return common_pb2.Stamp(
        request_id=request.request_id, attempt=request.attempt, round=request.round, base_length=len(request.tokens)
    )


def request_from(submit: verifier_pb2.Submit, owner: str, vocab_size: int, max_model_len: int) -> Request:
    """A request for the engine. Raises InvalidRequestError naming field, value and limit."""
    s = submit.sampling
    prompt, committed = list(submit.prompt_token_ids), list(submit.committed_token_ids)
    if not submit.stamp.request_id:
        raise InvalidRequestError.of("stamp.request_id", "is empty")
    if not prompt:
        raise InvalidRequestError.of("prompt_token_ids", "is empty, at least one token is needed")
    for name, ids in (("prompt_token_ids", prompt), ("committed_token_ids", committed)):
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequestError.of(name, f"{bad} is outside the vocabulary of {vocab_size}")
    if s.max_tokens < 1 or len(prompt) + s.max_tokens > max_model_len:
        raise InvalidRequestError.of(
            "max_tokens", f"{s.max_tokens} with a prompt of {len(prompt)} tokens; the context holds {max_model_len}"
        )
    if len(committed) >= s.max_tokens:
        raise InvalidRequestError.of("committed_token_ids", f"{len(committed)} tokens, max_tokens is {s.max_tokens}")
    if s.rule not in _RULES:
        raise InvalidRequestError.of("rule", f"{s.rule} is not supported, only RULE_MATCH and RULE_RATIO are")
    sampling = Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        max_tokens=s.max_tokens,
        # A model may name an end id that it has no row for; nothing can produce it.
        stop_token_ids=frozenset(token for token in s.stop_token_ids if 0 <= token < vocab_size),
        max_draft_tokens=s.max_draft_tokens if s.HasField("max_draft_tokens") else None,
        rule=_RULES[s.rule],
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        allowed_token_ids=tuple(s.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in s.bad_words),
        min_tokens=s.min_tokens,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
    )
    check(sampling, vocab_size)
    return Request(
        request_id=submit.stamp.request_id,
        attempt=submit.stamp.attempt,
        owner=owner,
        prompt_length=len(prompt),
        tokens=prompt + committed,
        sampling=sampling,
        tenant=submit.tenant,
    )


def update_message(update: Update) -> verifier_pb2.RequestUpdate:
    """One request's progress for the scheduler."""
    message = verifier_pb2.RequestUpdate(
        stamp=common_pb2.Stamp(
            request_id=update.request_id, attempt=update.attempt, round=update.round, base_length=update.base_length
        ),
        token_ids=update.tokens,
        drafted=update.drafted,
        verified=update.verified,
        accepted=update.accepted,
        decode_step=update.decode_step,
        cached_tokens=update.cached_tokens,
        logprobs=[
            types_pb2.TokenLogprobs(logprob=it.logprob, top_token_ids=it.top_ids, top_logprobs=it.top)
            for it in update.logprobs
        ],
    )
    if update.terminal is not None:
        message.terminal.CopyFrom(terminal_message(update.terminal))
    return message


def terminal_message(terminal: Terminal) -> verifier_pb2.Terminal:
    """The end of a request for the scheduler."""
    return verifier_pb2.Terminal(
        reason=_REASONS[terminal.reason],
        stop_token_id=terminal.stop_token_id,
        error_code=terminal.code,
        error_message=terminal.message,
    )


def policy_from(message: control_pb2.Policy) -> Policy:
    """The scheduler's order as a plain value."""
    return Policy(
        name=message.name,
        max_draft_tokens=message.max_draft_tokens,
        epoch=(message.epoch.boot_id, message.epoch.counter),
    )


def policy_message(policy: Policy) -> control_pb2.Policy:
    """The policy held, for a scheduler that may be new."""
    boot_id, counter = policy.epoch
    return control_pb2.Policy(
        epoch=control_pb2.PolicyEpoch(boot_id=boot_id, counter=counter),
        name=policy.name,
        max_draft_tokens=policy.max_draft_tokens,
    )


def load_message(load: EngineLoad, drafter: str = "", drafter_problem: str = "") -> control_pb2.Load:
    """The engine's load for the scheduler, with whom it drafts, or why not."""
    boot_id, counter = load.policy_epoch
    stats = load.stats
    return control_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        outstanding_tokens=load.outstanding_tokens,
        kv_pages_used=load.pages_used,
        kv_pages_total=load.pages_total,
        stats=types_pb2.GenerationStats(
            steps=stats.request_steps,
            drafted=stats.drafted,
            verified=stats.verified,
            accepted=stats.accepted,
            committed=stats.committed,
            k_hist=stats.k_hist,
        ),
        steps=stats.steps,
        step_seconds=load.step_seconds,
        policy_epoch=control_pb2.PolicyEpoch(boot_id=boot_id, counter=counter),
        drafter=drafter,
        drafter_problem=drafter_problem,
    )


def draft_from(message: drafter_pb2.Draft, vocab_size: int, signals: int) -> Draft:
    """A draft with `signals` signals a token. Raises InvalidRequestError naming what makes no sense of it."""
    ids = list(message.token_ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequestError.of("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    law = told = None
    if message.HasField("q"):
        law = _law(message.q, ids, vocab_size)
    if message.HasField("signals"):
        told = _array(message.signals, "signals", common_pb2.DTYPE_FLOAT32)
        if told.shape != (len(ids), signals) or not np.isfinite(told).all():
            raise InvalidRequestError.of("signals", f"must be {len(ids)} x {signals} finite numbers")
    return Draft(ids, law, told)


def _law(message: drafter_pb2.SparseLaw, drafted: list[int], vocab_size: int) -> SparseLaw:
    ids = _array(message.token_ids, "q.token_ids", common_pb2.DTYPE_INT32)
    q = _array(message.probabilities, "q.probabilities", common_pb2.DTYPE_FLOAT32)
    if ids.shape != q.shape or len(ids) != len(drafted):
        raise InvalidRequestError.of("q", f"has shapes {ids.shape} and {q.shape} for {len(drafted)} tokens")
    if not drafted:
        return SparseLaw(ids, q)
    if not ids.size:
        raise InvalidRequestError.of("q", "has no candidates")
    in_order = np.sort(ids, axis=1)
    if in_order[:, 0].min() < 0 or in_order[:, -1].max() >= vocab_size or (in_order[:, 1:] == in_order[:, :-1]).any():
        raise InvalidRequestError.of("q.token_ids", "an id is outside the vocabulary, or twice at one position")
    # NaN compares false with everything, so each condition is one that must hold.
    if not ((q >= 0).all() and (abs(q.sum(axis=1, dtype=np.float64) - 1) <= _SUM_TOLERANCE).all()):
        raise InvalidRequestError.of("q.probabilities", "a position's are not a distribution")
    if not ((ids == np.asarray(drafted)[:, None]) & (q > 0)).any(axis=1).all():
        raise InvalidRequestError.of("q", "a drafted token has no probability")
    return SparseLaw(ids, q)


def _array(tensor: common_pb2.Tensor, field: str, dtype: common_pb2.Dtype) -> np.ndarray:
    """[n, m] of int32 or float32."""
    shape = tensors.check(tensor, field, rank=2)
    if tensor.dtype != dtype:
        raise InvalidRequestError.of(f"{field}.dtype", f"is {tensor.dtype}, expected {dtype}")
    return np.frombuffer(tensor.data, "<i4" if dtype == common_pb2.DTYPE_INT32 else "<f4").reshape(shape)


class DraftRequestBuilder:
    """Fills one step's message to the drafter."""

    def __init__(self, step: int) -> None:
        self.request = drafter_pb2.DraftRequest(step=step)

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        it = self.request
        return not (it.closes or it.opens or it.commits or it.proposes)

    def open(self, request: Request) -> None:
        """Begins the request's session."""
        self.request.opens.add(stamp=stamp_of(request))

    def commit(self, request: Request, sent: int, rows: RowSlice | None = None) -> None:
        """Tokens from `sent` on, and feature rows."""
        message = self.request.commits.add(stamp=stamp_of(request), token_ids=request.tokens[sent:])
        message.stamp.base_length = sent
        if rows is not None:
            message.feature_rows.dtype = DTYPES[rows.dtype]
            message.feature_rows.shape.extend((rows.count, rows.width))
            message.feature_rows.data = rows.data
            message.feature_base = rows.first
            message.feature_fingerprint = rows.fingerprint

    def propose(self, request: Request, most: int) -> None:
        """Asks for at most `most` tokens."""
        s = request.sampling
        self.request.proposes.add(
            stamp=stamp_of(request),
            max_tokens=most,
            sampling=common_pb2.Sampling(
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                min_p=s.min_p,
                seed=s.seed,
                max_tokens=s.max_tokens,
                rule=RULES[s.rule],
            ),
        )

    def close(self, request_id: str, attempt: int) -> None:
        """Ends a session."""
        self.request.closes.add(stamp=common_pb2.Stamp(request_id=request_id, attempt=attempt))
