"""Between the public messages and the SDK's plain types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kadence import _wire
from kadence.errors import InternalError, InvalidRequestError
from kadence.types import (
    ClusterStatus,
    FinishReason,
    GenerateOptions,
    Message,
    ModelInfo,
    ReplicaStatus,
    Rule,
    SamplingOptions,
    Stats,
    TokenLogprobs,
)
from kadence.v1 import inference_pb2, types_pb2

_RULES: dict[str, types_pb2.Rule] = {"match": types_pb2.RULE_MATCH, "ratio": types_pb2.RULE_RATIO}
_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_SAMPLING = frozenset(SamplingOptions.__annotations__)
_CALL = frozenset({"timeout", "metadata"})
_REQUEST = frozenset(GenerateOptions.__annotations__) - _SAMPLING - _CALL


def request(prompt: str | None, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The message for `prompt` and `options` (keys of GenerateOptions). The server judges values; what cannot travel
    is refused here.

    Raises TypeError for an unknown option, InvalidRequestError for a value that does not fit its field.
    """
    for name in options.keys() - _SAMPLING - _REQUEST - _CALL:
        raise TypeError(f"generate() got an unexpected option {name!r}")
    message = inference_pb2.GenerateRequest()
    fields = {"prompt": prompt, **{name: options[name] for name in _REQUEST & options.keys()}}
    for name, value in fields.items():
        if value is None:
            continue
        if name == "messages":
            message.messages.extend(_messages(value))
        else:
            _wire.assign(message, name, name, value)
    message.sampling.SetInParent()
    for name in _SAMPLING & options.keys():
        if (value := options[name]) is None:
            continue
        if name == "rule":
            message.sampling.rule = _rule_number(value)
        else:
            _wire.assign(message.sampling, name, f"sampling.{name}", value)
    return message


def rule(value: int) -> Rule:
    """The rule's name; RULE_UNSPECIFIED counts as the default."""
    return "ratio" if value == types_pb2.RULE_RATIO else "match"


def finish_reason(value: int) -> FinishReason:
    """The reason's name. Raises InternalError for one that must not be sent."""
    if value not in _REASONS:
        raise InternalError(f"the server sent finish reason {value}, which this client does not know")
    return _REASONS[value]


def stats(message: types_pb2.GenerationStats) -> Stats:
    """Statistics as a plain type."""
    return Stats(
        steps=message.steps,
        drafted=message.drafted,
        verified=message.verified,
        accepted=message.accepted,
        committed=message.committed,
        k_hist=tuple(message.k_hist),
        cached_tokens=message.cached_tokens,
    )


def logprobs(message: inference_pb2.Chunk) -> tuple[TokenLogprobs, ...]:
    """One per token of the chunk, or none. Raises InternalError if they do not match the tokens."""
    if not message.logprobs:
        return ()
    if len(message.logprobs) != len(message.token_ids):
        counts = f"{len(message.logprobs)} log-probabilities for {len(message.token_ids)} tokens"
        raise InternalError(f"the server sent {counts}")
    return tuple(
        TokenLogprobs(token, item.logprob, tuple(zip(item.top_token_ids, item.top_logprobs, strict=False)))
        for token, item in zip(message.token_ids, message.logprobs, strict=True)
    )


def models(response: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """The served models as plain types."""
    return tuple(
        ModelInfo(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            drafter_kind=model.drafter_kind,
        )
        for model in response.models
    )


def status(response: inference_pb2.GetStatusResponse) -> ClusterStatus:
    """The snapshot as plain types."""
    return ClusterStatus(
        policy=response.policy,
        policy_epoch=response.policy_epoch,
        requests_in_flight=response.requests_in_flight,
        requests_queued=response.requests_queued,
        replicas=tuple(_replica(replica) for replica in response.replicas),
    )


def _replica(message: inference_pb2.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=message.replica_id,
        kind=message.kind,
        address=message.address,
        state=message.state,
        serves=message.serves,
        metrics_address=message.metrics_address,
        http_address=message.http_address,
        pid=message.pid,
        running=message.running,
        waiting=message.waiting,
        kv_pages_used=message.kv_pages_used,
        kv_pages_total=message.kv_pages_total,
        policy_epoch=message.policy_epoch,
        stats=stats(message.stats),
        drafter=message.drafter,
        drafter_problem=message.drafter_problem,
    )


def _messages(value: Any) -> list[types_pb2.ChatMessage]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InvalidRequestError.of("messages", f"{_wire.short(value)}; a list of messages")
    return [_chat_message(index, item) for index, item in enumerate(value)]


def _chat_message(index: int, item: Message | Mapping[str, str]) -> types_pb2.ChatMessage:
    if isinstance(item, Message):
        item = {"role": item.role, "content": item.content}
    if not isinstance(item, Mapping) or item.keys() != {"role", "content"}:
        raise InvalidRequestError.of(f"messages[{index}]", "is not an object of exactly role and content")
    message = types_pb2.ChatMessage()
    for name, value in item.items():
        _wire.assign(message, name, f"messages[{index}].{name}", value)
    return message


def _rule_number(value: Any) -> types_pb2.Rule:
    if not isinstance(value, str) or value not in _RULES:
        raise InvalidRequestError.of("sampling.rule", f"{_wire.short(value)} is not one of {', '.join(_RULES)}")
    return _RULES[value]
