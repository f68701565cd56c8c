"""Makes a request out of an ask: checks it, renders and tokenises its prompt, fills in the defaults."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kadence.errors import InvalidRequestError
from services.scheduler import validate
from services.scheduler.request import Ask, Limits, Request, Rule, Sampling
from services.scheduler.tokenizer import Tokenizer

# Shorter text is tokenised in less time than a change of threads takes.
_INLINE_CHARACTERS = 2048
# Exact in every JSON reader.
_SEED_BITS = 53


class Prompts:
    """Understands asks with one model's tokenizer, under limits that may change between calls."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], limits: Callable[[], Limits]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
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
        if violations:
            raise validate.error(violations)
        return [self._request(ask, prompt, max_tokens)]

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
        if size <= _INLINE_CHARACTERS:
            return tuple(encode())
        return tuple(await asyncio.get_running_loop().run_in_executor(self._thread, encode))

    def _request(self, ask: Ask, prompt: tuple[int, ...], max_tokens: int) -> Request:
        o, resume = ask.options, ask.resume
        seed = resume.seed if resume is not None else o.seed
        eos = () if o.ignore_eos else self._eos_token_ids
        sampling = Sampling(
            temperature=o.temperature if o.temperature is not None else 0.0,
            top_p=o.top_p if o.top_p is not None else 1.0,
            top_k=o.top_k if o.top_k is not None else 0,
            seed=seed if seed is not None else secrets.randbits(_SEED_BITS),
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*eos, *o.stop_token_ids))),
            rule=Rule.MATCH,
            max_draft_tokens=o.max_draft_tokens,
            priority=o.priority if o.priority is not None else 1.0,
        )
        return Request(
            request_id=ask.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=sampling,
            stop=o.stop,
            resumed=resume.token_ids if resume is not None else (),
            attempt=resume.attempt + 1 if resume is not None else 0,
        )
