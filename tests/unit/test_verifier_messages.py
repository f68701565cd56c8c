"""The verifier's edge: what a Submit becomes, what is refused and how, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2, control_pb2, verifier_pb2
from kadence.v1 import types_pb2
from services.verifier import messages
from services.verifier.allocation import Policy
from services.verifier.outcomes import EngineLoad, TokenLogprobs, Totals, Update
from services.verifier.request import FinishReason, Request, Sampling, Terminal

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


def word(*tokens: int) -> common_pb2.TokenSequence:
    return common_pb2.TokenSequence(token_ids=tokens)


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


def test_the_rule_and_its_noise() -> None:
    """Rule `ratio` draws with (seed, attempt, round), where it draws."""
    request = taken(submit(rule=types_pb2.RULE_RATIO, temperature=0.5))
    assert (request.sampling.rule, request.noise) == ("ratio", (7, 3, 0))
    request.round = 5
    assert request.noise == (7, 3, 5)
    assert taken(submit(rule=types_pb2.RULE_RATIO)).noise is None
    plain = taken(submit(temperature=0.5))
    assert (plain.sampling.rule, plain.noise) == ("match", None)


def test_the_drafter_is_told_the_rule() -> None:
    for rule in (types_pb2.RULE_MATCH, types_pb2.RULE_RATIO):
        builder = messages.DraftRequestBuilder(1)
        builder.propose(taken(submit(rule=rule)), 2)
        assert builder.request.proposes[0].sampling.rule == rule


def test_every_option() -> None:
    numbers = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 0.5}
    words = [common_pb2.TokenSequence(token_ids=[4]), common_pb2.TokenSequence(token_ids=[5, 6])]
    ids = {"logit_bias": {7: 100.0, 8: -0.5}, "allowed_token_ids": [7, 8, 5], "bad_words": words}
    s = taken(submit(min_tokens=3, logprobs=0, stop_token_ids=[5, 100, -1], **numbers, **ids)).sampling
    assert {name: getattr(s, name) for name in numbers} == numbers
    assert (s.logit_bias, s.allowed_token_ids, s.bad_words) == ({7: 100.0, 8: -0.5}, (7, 8, 5), ((4,), (5, 6)))
    assert (s.min_tokens, s.logprobs) == (3, 0)
    assert s.stop_token_ids == {5}  # a model's end ids may lie outside its vocabulary
    law = taken(submit(**numbers)).law(11)
    assert law.min_p == 0.25 and law.edits is None


def test_options_left_out_change_nothing() -> None:
    s = taken(submit(stop_token_ids=[5], max_draft_tokens=1)).sampling
    assert s == Sampling(0.0, 1.0, 0, 7, 10, frozenset({5}), 1) and not s.edits


def test_limits_are_inclusive() -> None:
    assert taken(submit(prompt=(0, VOCAB - 1), max_tokens=CONTEXT - 2)).remaining == CONTEXT - 2
    assert taken(submit(temperature=100.0, top_p=1.0)).sampling.temperature == 100
    assert taken(submit(committed=(1,) * 9)).remaining == 1
    assert taken(submit(min_p=1.0, min_tokens=10, logprobs=20)).sampling.logprobs == 20
    assert taken(submit(allowed_token_ids=[VOCAB - 1, 0], bad_words=[word(0), word(VOCAB - 1)])).sampling.edits
    # Excluded by bad words are all ids allowed: then bad words give way.
    assert taken(submit(allowed_token_ids=[4], bad_words=[word(4)], min_tokens=2, stop_token_ids=[3])).sampling.edits


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
        (submit(rule=types_pb2.RULE_UNSPECIFIED), "rule", "0 is not supported, only RULE_MATCH and RULE_RATIO"),
        (submit(rule=7), "rule", "7 is not supported"),
        (submit(temperature=-0.5), "sampling", "temperature -0.5"),
        (submit(temperature=float("nan")), "sampling", "temperature nan"),
        (submit(temperature=float("inf")), "sampling", "temperature inf"),
        (submit(temperature=101.0), "sampling", "temperature 101.0"),
        (submit(top_p=0.0), "sampling", "top_p 0.0"),
        (submit(top_p=1.5), "sampling", "top_p 1.5"),
        (submit(top_p=float("nan")), "sampling", "top_p nan"),
        (submit(top_k=-1), "sampling", "top_k -1"),
        (submit(min_p=-0.5), "min_p", "-0.5 is out of range, 0 to 1"),
        (submit(min_p=1.5), "min_p", "1.5 is out of range, 0 to 1"),
        (submit(min_p=float("nan")), "min_p", "nan"),
        (submit(repetition_penalty=0.0), "repetition_penalty", "0.0 is out of range, above 0"),
        (submit(repetition_penalty=-1.0), "repetition_penalty", "-1.0 is out of range, above 0"),
        (submit(repetition_penalty=float("inf")), "repetition_penalty", "inf is out of range"),
        (submit(presence_penalty=float("nan")), "presence_penalty", "nan is out of range"),
        (submit(frequency_penalty=float("-inf")), "frequency_penalty", "-inf is out of range"),
        (submit(logit_bias={5: float("inf")}), "logit_bias", "inf of id 5 is out of range"),
        (submit(logit_bias={100: 1.0}), "logit_bias", "100 is outside the vocabulary of 100"),
        (submit(allowed_token_ids=[1, -1]), "allowed_token_ids", "-1 is outside the vocabulary of 100"),
        (submit(bad_words=[word(1), word()]), "bad_words[1]", "is empty, at least one token"),
        (submit(bad_words=[word(1, 100)]), "bad_words[0]", "100 is outside the vocabulary of 100"),
        (submit(min_tokens=-1), "min_tokens", "-1 is out of range, 0 to max_tokens, which is 10"),
        (submit(min_tokens=11), "min_tokens", "11 is out of range, 0 to max_tokens, which is 10"),
        (submit(min_tokens=1, allowed_token_ids=[4, 5], stop_token_ids=[5, 6, 4]), "min_tokens", "is a stop id"),
        (submit(min_tokens=1, stop_token_ids=range(VOCAB)), "min_tokens", "is a stop id"),
        (submit(logprobs=-1), "logprobs", "-1 is out of range, 0 to 20"),
        (submit(logprobs=21), "logprobs", "21 is out of range, 0 to 20"),
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
    assert message.terminal.stop_token_id == 2 and not message.logprobs
    assert not messages.update_message(Update("r", 3, "owner", 7, 20, [1])).HasField("terminal")


def test_log_probabilities_and_cached_tokens() -> None:
    entries = [TokenLogprobs(-0.5, [1, 9], [-0.5, -2.0]), TokenLogprobs(-3.0, [], [])]
    message = messages.update_message(Update("r", 0, "o", 0, 3, [1, 2], logprobs=entries, cached_tokens=16))
    assert message.cached_tokens == 16
    assert list(message.logprobs) == [
        types_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[1, 9], top_logprobs=[-0.5, -2.0]),
        types_pb2.TokenLogprobs(logprob=-3.0),
    ]


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
    load = messages.load_message(EngineLoad(2, 1, 500, 3, 8, 0.25, (4, 5), stats), "d-1", "why")
    assert (load.drafter, load.drafter_problem) == ("d-1", "why")
    assert (load.running, load.waiting, load.outstanding_tokens) == (2, 1, 500)
    assert (load.kv_pages_used, load.kv_pages_total, load.steps, load.step_seconds) == (3, 8, 3, 0.25)
    assert load.policy_epoch == control_pb2.PolicyEpoch(boot_id=4, counter=5)
    wanted = types_pb2.GenerationStats(steps=10, drafted=70, verified=60, accepted=30, committed=40, k_hist=[1, 0, 9])
    assert load.stats == wanted
