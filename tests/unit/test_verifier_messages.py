"""The verifier's edge: what a Submit becomes, what is refused and how, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2, control_pb2, verifier_pb2
from kadence.v1 import types_pb2
from services.verifier import messages
from services.verifier.allocation import Policy
from services.verifier.outcomes import EngineLoad, Totals, Update
from services.verifier.request import FinishReason, Request, Terminal

VOCAB, CONTEXT = 100, 32


def submit(
    name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), committed: tuple[int, ...] = (), **sampling: Any
) -> verifier_pb2.Submit:
    defaults = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 10, "rule": types_pb2.RULE_MATCH, "seed": 7}
    return verifier_pb2.Submit(
        stamp=common_pb2.Stamp(request_id=name, attempt=3),
        prompt_token_ids=prompt,
        committed_token_ids=committed,
        sampling=common_pb2.Sampling(**{**defaults, **sampling}),
        tenant="t",
    )


def taken(message: verifier_pb2.Submit) -> Request:
    return messages.request_from(message, "owner", VOCAB, CONTEXT)


def test_a_request() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 4, "seed": 2**64 - 1, "stop_token_ids": [5, 6]}
    request = taken(submit(committed=(8, 9), max_draft_tokens=0, **sampling))
    assert (request.request_id, request.attempt, request.owner, request.tenant) == ("r", 3, "owner", "t")
    assert (request.tokens, request.prompt_length, request.produced, request.remaining) == ([1, 2, 3, 8, 9], 3, 2, 8)
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.seed) == (0.5, 0.25, 4, 2**64 - 1)
    assert (s.max_tokens, s.stop_token_ids, s.max_draft_tokens) == (10, {5, 6}, 0)
    assert taken(submit()).sampling.max_draft_tokens is None
    law = request.law(11)
    assert (law.temperature, law.top_k, law.top_p, law.seed, law.position) == (0.5, 4, 0.25, 2**64 - 1, 11)


def test_limits_are_inclusive() -> None:
    assert taken(submit(prompt=(0, VOCAB - 1), max_tokens=CONTEXT - 2)).remaining == CONTEXT - 2
    assert taken(submit(temperature=100.0, top_p=1.0)).sampling.temperature == 100
    assert taken(submit(committed=(1,) * 9)).remaining == 1


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (submit(name=""), "stamp.request_id", "is empty"),
        (submit(prompt=()), "prompt_token_ids", "is empty"),
        (submit(prompt=(1, VOCAB)), "prompt_token_ids", "100 is outside the vocabulary of 100"),
        (submit(prompt=(1, -1)), "prompt_token_ids", "-1 is outside"),
        (submit(committed=(100,)), "committed_token_ids", "100 is outside"),
        (submit(max_tokens=0), "max_tokens", "0 with a prompt of 3 tokens; the context holds 32"),
        (submit(max_tokens=30), "max_tokens", "30 with a prompt of 3 tokens; the context holds 32"),
        (submit(committed=(1,) * 10), "committed_token_ids", "10 tokens, max_tokens is 10"),
        (submit(rule=types_pb2.RULE_RATIO), "rule", "RULE_RATIO is not supported"),
        (submit(rule=types_pb2.RULE_UNSPECIFIED), "rule", "RULE_UNSPECIFIED is not supported"),
        (submit(temperature=-0.5), "sampling", "temperature -0.5"),
        (submit(temperature=float("nan")), "sampling", "temperature nan"),
        (submit(temperature=float("inf")), "sampling", "temperature inf"),
        (submit(temperature=101.0), "sampling", "temperature 101.0"),
        (submit(top_p=0.0), "sampling", "top_p 0.0"),
        (submit(top_p=1.5), "sampling", "top_p 1.5"),
        (submit(top_p=float("nan")), "sampling", "top_p nan"),
        (submit(top_k=-1), "sampling", "top_k -1"),
    ],
)
def test_refusals(message: verifier_pb2.Submit, field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        taken(message)
    assert caught.value.violations[0].field == field and says in caught.value.message
    assert "\n" not in caught.value.message


def test_append_ends_with_the_first_stop_id_or_the_last_token() -> None:
    request = taken(submit(max_tokens=4, stop_token_ids=[9]))
    assert request.append([1, 2]) == ([1, 2], None)
    tokens, end = request.append([3, 9, 4, 5])
    assert tokens == [3, 9] and end == Terminal(FinishReason.STOP, stop_token_id=9)
    request = taken(submit(max_tokens=3))
    tokens, end = request.append([1, 2, 3, 4])
    assert tokens == [1, 2, 3] and end == Terminal(FinishReason.LENGTH) and len(request.tokens) == 6


def test_updates() -> None:
    update = Update("r", 3, "owner", 7, 20, [1, 2], 5, 4, 1, True, Terminal(FinishReason.STOP, stop_token_id=2))
    message = messages.update_message(update)
    assert message.stamp == common_pb2.Stamp(request_id="r", attempt=3, round=7, base_length=20)
    assert (list(message.token_ids), message.drafted, message.verified, message.accepted) == ([1, 2], 5, 4, 1)
    assert message.decode_step and message.terminal.reason == types_pb2.FINISH_REASON_STOP
    assert message.terminal.stop_token_id == 2
    assert not messages.update_message(Update("r", 3, "owner", 7, 20, [1])).HasField("terminal")


@pytest.mark.parametrize("reason", list(FinishReason))
def test_terminals(reason: FinishReason) -> None:
    message = messages.terminal_message(Terminal(reason, code="INTERNAL", message="why"))
    assert types_pb2.FinishReason.Name(message.reason) == f"FINISH_REASON_{reason.name}"
    assert (message.stop_token_id, message.error_code, message.error_message) == (-1, "INTERNAL", "why")


def test_policies_survive_the_way_there_and_back() -> None:
    policy = Policy("fixed:7", 7, (2**63, 5))
    assert messages.policy_from(messages.policy_message(policy)) == policy


def test_load() -> None:
    stats = Totals(3, 10, 70, 60, 30, 40, 99, 41, 2, [1, 0, 9], [5, 4])
    load = messages.load_message(EngineLoad(2, 1, 500, 3, 8, 0.25, (4, 5), stats))
    assert (load.running, load.waiting, load.outstanding_tokens) == (2, 1, 500)
    assert (load.kv_pages_used, load.kv_pages_total, load.steps, load.step_seconds) == (3, 8, 3, 0.25)
    assert load.policy_epoch == control_pb2.PolicyEpoch(boot_id=4, counter=5)
    wanted = types_pb2.GenerationStats(steps=10, drafted=70, verified=60, accepted=30, committed=40, k_hist=[1, 0, 9])
    assert load.stats == wanted
