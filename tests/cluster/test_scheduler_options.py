"""Sampling options through a real scheduler: what reaches the verifier, and what comes back with the tokens."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import InternalError, InvalidRequestError
from kadence.v1 import inference_pb2, types_pb2
from services.scheduler import messages
from services.scheduler.generation import Piece
from services.scheduler.tokenizer import Tokenizer
from tests.support import fake_verifier, tiny_model
from tests.support.fake_verifier import FakeVerifier, seeded
from tests.support.scheduling import Cluster, Result, ask, says, scheduler, settled, until

PROMPT = [5, 6, 7]


async def submitted(cluster: Cluster, verifier: FakeVerifier, **fields: Any) -> Any:
    """The sampling that a request came to."""
    await cluster.generate(ask(ids=PROMPT, **fields))
    return verifier.submits[-1].sampling


async def test_every_option_reaches_the_verifier(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    numbers = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "min_tokens": 3,
        "logprobs": 0,
    }
    sampling = await submitted(
        cluster,
        verifier,
        max_tokens=5,
        logit_bias={0: -100.0, 329: 0.5},
        allowed_token_ids=[9, 300, 9, *range(2, 300)],
        ignore_eos=True,
        **numbers,
    )
    assert {name: getattr(sampling, name) for name in numbers} == numbers and sampling.HasField("logprobs")
    assert dict(sampling.logit_bias) == {0: -100.0, 329: 0.5}
    assert sorted(sampling.allowed_token_ids) == list(range(2, 301))
    plain = await submitted(cluster, verifier, max_tokens=5)
    assert (plain.min_p, plain.repetition_penalty, plain.presence_penalty, plain.frequency_penalty) == (0, 1, 0, 0)
    assert not plain.HasField("logprobs") and not plain.logit_bias and not plain.allowed_token_ids
    assert not plain.bad_words and plain.min_tokens == 0


async def test_the_rule_reaches_the_verifier(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    for asked, used in (
        (types_pb2.RULE_UNSPECIFIED, types_pb2.RULE_MATCH),
        (types_pb2.RULE_MATCH, types_pb2.RULE_MATCH),
        (types_pb2.RULE_RATIO, types_pb2.RULE_RATIO),
    ):
        result = await cluster.generate(ask(ids=PROMPT, max_tokens=5, rule=asked, seed=2**64 - 1))
        assert result.started is not None and (result.started.rule, result.started.seed) == (used, 2**64 - 1)
        sampling = verifier.submits[-1].sampling
        assert (sampling.rule, sampling.seed) == (used, 2**64 - 1)


@pytest.mark.parametrize("rule", ["RULE_MATCH", "RULE_RATIO"])
async def test_a_resumed_stream_keeps_its_rule(pair: tuple[Cluster, FakeVerifier], rule: str) -> None:
    """Under `ratio` with noise that is new to the text, whichever attempt the client thinks it was at."""
    cluster, verifier = pair
    number, seeds = types_pb2.Rule.Value(rule), set()
    for held in range(4):
        resume = inference_pb2.Resume(token_ids=[9] * held, seed=3, rule=number)
        result = await cluster.generate(ask(ids=PROMPT, max_tokens=5, ignore_eos=True, resume=resume))
        assert result.started is not None and (result.started.rule, result.started.seed) == (number, 3)
        submit = verifier.submits[-1]
        assert (submit.sampling.rule, submit.stamp.attempt) == (number, 1)
        seeds.add(submit.sampling.seed)
    assert len(seeds) == (1 if rule == "RULE_MATCH" else 4)


async def test_bad_words_travel_as_ids(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> None:
    cluster, verifier = pair
    sampling = await submitted(cluster, verifier, max_tokens=5, bad_words=["the", "  quick", "<tool>"])
    # Alone, and after a space where that is another first token and no more tokens.
    spellings = ["the", " the", "quick", " quick", "<tool>"]
    assert [list(word.token_ids) for word in sampling.bad_words] == [tokenizer.encode(text) for text in spellings]
    assert len(tokenizer.encode(" <tool>")) == 2


async def test_bad_words_that_the_model_has_no_row_for(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    async with (
        scheduler(folder(tokenizer_folder, {}, vocab_size=200), attach_wait_seconds=5) as cluster,
        FakeVerifier(cluster.inner, vocab_size=200) as verifier,
    ):
        await until(lambda: verifier.streams)
        sampling = await submitted(cluster, verifier, max_tokens=5, bad_words=["the", "x"])
        assert min(tokenizer.encode("the")) >= 200 > max(tokenizer.encode("x"))
        assert [list(word.token_ids) for word in sampling.bad_words if word] == [tokenizer.encode("x")]


GENERATION = {
    "do_sample": True,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "max_new_tokens": 12,
}


def folder(beside: Path, generation: dict[str, object], **config: object) -> Path:
    """A model folder beside another, with that generation config."""
    path = Path(tempfile.mkdtemp(dir=beside.parent)) / "tiny"
    path.mkdir()
    tiny_model.write(path, **config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": tiny_model.END} | generation))
    return path


@pytest.mark.parametrize("switched_on", [True, False])
async def test_defaults_of_the_model(tokenizer_folder: Path, switched_on: bool) -> None:
    path = folder(tokenizer_folder, GENERATION)
    async with (
        scheduler(path, generation_defaults=switched_on, default_max_tokens=9) as cluster,
        FakeVerifier(cluster.inner) as verifier,
    ):
        await until(lambda: verifier.streams)
        s = await submitted(cluster, verifier)
        found = (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty, s.max_tokens)
        assert found == ((0.5, 0.75, 7, 0.125, 1.25, 12) if switched_on else (0.0, 1.0, 0, 0.0, 1.0, 9))
        given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3}
        s = await submitted(cluster, verifier, **given)
        assert {name: getattr(s, name) for name in given} == given  # what the request says, neutral or not, holds
        await cluster.generate(ask(ids=[5] * 250))
        assert verifier.submits[-1].sampling.max_tokens == tiny_model.CONTEXT - 250  # clipped to the context


def aligned(result: Result, count: int) -> None:
    """One for each token, and it is that token's."""
    assert result.logprobs == [fake_verifier.logprobs(token, count) for token in result.token_ids]


@pytest.mark.parametrize("count", [0, 3, 20])
@pytest.mark.parametrize("per_step", [1, 4])
async def test_log_probabilities_come_with_their_tokens(
    pair: tuple[Cluster, FakeVerifier], count: int, per_step: int
) -> None:
    cluster, verifier = pair
    verifier.script, verifier.per_step = seeded, per_step
    results = await cluster.answers(ask(ids=PROMPT, n=2, seed=1, max_tokens=21, ignore_eos=True, logprobs=count))
    for result in results:
        assert len(result.token_ids) == 21
        aligned(result, count)
    assert (await cluster.generate(ask(ids=PROMPT, max_tokens=5))).logprobs == []


async def test_log_probabilities_are_cut_with_the_tokens(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer
) -> None:
    """A stop string may be complete in the middle of a block, whose rest belongs to nobody."""
    cluster, verifier = pair
    ids = tokenizer.encode("hello sto, stop here and there")
    says(verifier, ids)
    for per_step in (1, 4, 50):
        verifier.per_step = per_step
        result = await cluster.generate(ask(max_tokens=100, stop=["stop he"], logprobs=2))
        assert result.text == "hello sto, " and len(result.token_ids) < len(ids)
        aligned(result, 2)


async def test_log_probabilities_of_held_tokens_are_not_sent_again(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, _ = pair
    whole = await cluster.generate(ask(ids=PROMPT, max_tokens=20, ignore_eos=True, logprobs=1))
    for held in (1, 7, 20):
        resume = inference_pb2.Resume(token_ids=whole.token_ids[:held])
        again = await cluster.generate(ask(ids=PROMPT, max_tokens=20, ignore_eos=True, logprobs=1, resume=resume))
        assert again.token_ids == whole.token_ids[held:] and again.logprobs == whole.logprobs[held:]


async def test_a_verifier_that_leaves_them_out_is_at_fault(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    plain = verifier._update

    def forgetful(*args: Any) -> Any:
        update = plain(*args)
        del update.logprobs[-1:]
        return update

    verifier._update = forgetful  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="0 log-probabilities of 1 tokens"):
        await cluster.generate(ask(ids=PROMPT, max_tokens=20, ignore_eos=True, logprobs=1))
    await settled(cluster, verifier)


async def test_a_slow_reader_gets_pieces_of_moderate_size(
    pair: tuple[Cluster, FakeVerifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.session._MOST_TAKEN", 10)
    cluster, verifier = pair
    verifier.script = seeded
    request = ask(ids=PROMPT, n=2, seed=0, max_tokens=200, ignore_eos=True, logprobs=20)
    generation = await cluster.service._intake.open(messages.ask(request), 20.0)
    await until(lambda: verifier.submits and not verifier.running)  # it has finished long before anybody reads
    pieces: dict[int, list[Piece]] = {0: [], 1: []}
    async with asyncio.timeout(10):
        async for event in generation.events():
            if isinstance(event, Piece):
                assert len(event.token_ids) < 10 + verifier.per_step
                pieces[event.index].append(event)
    for index, submit in enumerate(verifier.submits):
        ids = [token for piece in pieces[index] for token in piece.token_ids]
        tops = [list(law.top_ids) for piece in pieces[index] for law in piece.logprobs]
        assert ids == list(seeded(submit)) and len(pieces[index]) > 15
        assert tops == [list(fake_verifier.logprobs(token, 20).top_token_ids) for token in ids]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a "), (2, "a "), (6, "a stop b "), (100, "a stop b stop c")])
async def test_stop_strings_wait_for_min_tokens(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer, min_tokens: int, text: str
) -> None:
    cluster, verifier = pair
    ids = tokenizer.encode("a stop b stop c")
    first = next(i for i in range(len(ids)) if "stop" in tokenizer.decode(ids[:i]))  # tokens that complete it
    assert 2 < first <= 6 < len(ids)
    says(verifier, ids)
    for per_step in (1, 3, 50):
        verifier.per_step = per_step
        result = await cluster.generate(ask(max_tokens=100, min_tokens=min_tokens, stop=["stop"]))
        assert result.text == text
        assert len(result.token_ids) > min_tokens or result.reason == "LENGTH"
    at = await cluster.generate(ask(max_tokens=100, min_tokens=first, stop=["stop"]))
    before = await cluster.generate(ask(max_tokens=100, min_tokens=first - 1, stop=["stop"]))
    assert (before.text, at.text) == ("a ", "a stop b ")


async def test_a_held_stop_id_before_min_tokens_is_no_end(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    resume = inference_pb2.Resume(token_ids=[50, tiny_model.END])
    for min_tokens, submits in ((1, 0), (2, 1)):
        says(verifier, [50, tiny_model.END, 51])
        await cluster.generate(ask(ids=PROMPT, max_tokens=3, min_tokens=min_tokens, resume=resume))
        assert len(verifier.submits) == submits


async def test_cached_tokens_are_told_for_each_answer(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.cached = 2
    results = await cluster.answers(ask(ids=PROMPT, n=2, max_tokens=9, ignore_eos=True))
    assert [result.finished.stats.cached_tokens for result in results if result.finished] == [2, 2]


async def test_wrong_options_are_named_all_at_once(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    request = ask("x", n=65, logprobs=21, min_p=2.0, bad_words=["a", ""], min_tokens=300, logit_bias={400: 1.0})
    with pytest.raises(InvalidRequestError) as caught:
        await cluster.generate(request)
    assert [violation.field for violation in caught.value.violations] == [
        "sampling.min_p",
        "sampling.n",
        "sampling.logprobs",
        "sampling.logit_bias[400]",
        "sampling.bad_words[1]",
        "sampling.min_tokens",
    ]
    assert not verifier.submits
