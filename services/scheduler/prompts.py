"""Makes a request out of an ask: checks it, renders and tokenises its prompt, fills in the defaults."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kadence.errors import FieldViolation, InvalidRequestError
from services.scheduler import bad_words, validate
from services.scheduler.generation_defaults import GenerationDefaults
from services.scheduler.request import Ask, Limits, Request, Rule, Sampling
from services.scheduler.tokenizer import Tokenizer

# Shorter text is tokenised in less time than a change of threads takes.
_INLINE_CHARACTERS = 2048
# Exact in every JSON reader.
_SEED_BITS = 53
_SEEDS = 2**64

T = TypeVar("T")


class Prompts:
    """Understands asks with one model's tokenizer and defaults, under limits that may change between calls."""

    def __init__(self, tokenizer: Tokenizer, defaults: GenerationDefaults, limits: Callable[[], Limits]) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def understand(self, ask: Ask) -> list[Request]:
        """The request, once for each answer. Raises InvalidRequestError with everything that is wrong."""
        limits = self._limits()
        violations = validate.check(ask, limits)
        max_tokens, prompt = 0, tuple[int, ...]()
        if not any(v.field.startswith(("prompt", "messages")) for v in violations):
            try:
                prompt = await self._tokens(ask)
                max_tokens, wrong = validate.room(len(prompt), ask, limits)
                violations += wrong
                if not ask.prompt_token_ids:  # a tokenizer may know more ids than the model has rows
                    violations += validate.check_ids(validate.input_field(ask), prompt, limits)
            except InvalidRequestError as error:
                violations += error.violations
        words = tuple[tuple[int, ...], ...]()
        if ask.options.bad_words and not any(v.field.startswith("sampling.bad_words") for v in violations):
            words, wrong = await self._bad_words(ask, limits)
            violations += wrong
        if violations:
            raise validate.error(violations)
        return _answers(ask, prompt, self._sampling(ask, limits, max_tokens, words))

    def close(self) -> None:
        """Stops the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _tokens(self, ask: Ask) -> tuple[int, ...]:
        if ask.prompt_token_ids:
            return ask.prompt_token_ids
        if ask.messages:
            size = sum(len(content) for _, content in ask.messages)
            encode = partial(self._tokenizer.encode_chat, ask.messages)
        else:
            text = ask.prompt or ""
            size, encode = len(text), partial(self._tokenizer.encode, text)
        return tuple(await self._run(size, encode))

    async def _bad_words(self, ask: Ask, limits: Limits) -> tuple[tuple[tuple[int, ...], ...], list[FieldViolation]]:
        words = ask.options.bad_words
        encode = partial(bad_words.sequences, words, self._tokenizer.encode_words)
        found, wrong = await self._run(sum(map(len, words)), encode)
        # A tokenizer may know more ids than the model has rows; such a sequence is never produced.
        return tuple(ids for ids in found if max(ids) < limits.vocab_size), wrong

    async def _run(self, characters: int, encode: Callable[[], T]) -> T:
        """Tokenises that many characters, here or in the thread."""
        if characters <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)

    def _sampling(self, ask: Ask, limits: Limits, max_tokens: int, words: tuple[tuple[int, ...], ...]) -> Sampling:
        """Of the first answer: what the ask says, else what the model's defaults say."""
        o, d, resume = ask.options, self._defaults, ask.resume
        seed = resume.seed if resume is not None else o.seed
        rule = Rule((resume.rule if resume is not None else 0) or o.rule or Rule.MATCH)
        eos = () if o.ignore_eos else limits.eos_token_ids
        return Sampling(
            temperature=_or(o.temperature, d.temperature),
            top_p=_or(o.top_p, d.top_p),
            top_k=_or(o.top_k, d.top_k),
            seed=seed if seed is not None else secrets.randbits(_SEED_BITS),
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*eos, *o.stop_token_ids))),
            rule=rule,
            max_draft_tokens=o.max_draft_tokens,
            priority=_or(o.priority, 1.0),
            min_p=_or(o.min_p, d.min_p),
            repetition_penalty=_or(o.repetition_penalty, d.repetition_penalty),
            presence_penalty=_or(o.presence_penalty, 0.0),
            frequency_penalty=_or(o.frequency_penalty, 0.0),
            logit_bias=o.logit_bias,
            allowed_token_ids=tuple(dict.fromkeys(o.allowed_token_ids)),
            bad_words=words,
            min_tokens=_or(o.min_tokens, 0),
            logprobs=o.logprobs,
        )


def _answers(ask: Ask, prompt: tuple[int, ...], sampling: Sampling) -> list[Request]:
    """One request for each answer; they differ in their seeds, and in what a resumed client holds of them."""
    n, resume = _or(ask.options.n, 1), ask.resume
    held = (resume.token_ids, *resume.more) if resume is not None else ()
    first = Request(
        request_id=ask.request_id or uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=ask.options.stop,
        resumed=held[0] if held else (),
        attempt=resume.attempt + 1 if resume is not None else 0,
    )
    others = [
        replace(
            first,
            index=index,
            sampling=replace(sampling, seed=(sampling.seed + index) % _SEEDS),
            resumed=held[index] if index < len(held) else (),
        )
        for index in range(1, n)
    ]
    return [first, *others]


def _or(given: T | None, default: T) -> T:
    return default if given is None else given
