"""A fake cluster for tests of programs that use the SDK: a real gRPC server in this process, answering by script."""

from __future__ import annotations

import codecs
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from kadence import _status
from kadence.errors import APIError, InvalidRequestError, UnavailableError
from kadence.types import Message
from kadence.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Said = str | bytes | Sequence[str | bytes]
"""An answer as text or as token ids 0..255 (bytes), or a sequence with one for each of n."""
VOCAB_SIZE = 256
_THREADS = 256
"""Most streams at a time; more wait."""


@dataclass(frozen=True)
class Request:
    """A request as the fake gateway received it."""

    prompt: str
    """The prompt's text: as it was sent, the last message's content, or what the token ids spell."""
    messages: tuple[Message, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The sampling options that were set, by name."""
    request_id: str = ""
    model: str = ""
    resumed: tuple[tuple[int, ...], ...] = ()
    """Token ids that a resumed stream holds, per answer; empty for a first try."""
    attempt: int = 0
    """0 for a first try."""
    metadata: Mapping[str, str] = field(default_factory=dict)


class FakeGateway:
    """Serves on the loopback between `with` and its end; tests of any kind may use it, many clients at once.

        with FakeGateway({"Hi": "Hello you"}) as gateway, Client(gateway.endpoint) as client:
            assert client.generate("Hi").text == "Hello you"
            assert gateway.requests[0].options == {}

    `answers` maps a prompt (or a conversation's last message) to its answer, or is a function from the Request; a
    prompt without an answer gets INVALID_ARGUMENT. Token ids are the UTF-8 bytes of the text, one a Chunk. Sampling
    options are recorded and, but for max_tokens, n, seed and logprobs, have no effect. `delay` is in seconds before
    each message after the first; `credentials` serve TLS; `port` 0 takes a free one. Raises OSError if it is taken.
    """

    def __init__(
        self,
        answers: Mapping[str, Said] | Callable[[Request], Said],
        *,
        model: str = "fake",
        delay: float = 0.0,
        credentials: grpc.ServerCredentials | None = None,
        port: int = 0,
    ) -> None:
        self.requests: list[Request] = []
        """What came in, refused ones included."""
        self._answers = answers
        self._model = model
        self._delay = delay
        self._refusals: deque[APIError] = deque()
        self._breaks: deque[tuple[int, APIError]] = deque()
        self._said: dict[str, Said] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fake gateway")
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Servicer(self), self._server)
        address = f"127.0.0.1:{port}"
        try:
            bound = (
                self._server.add_insecure_port(address)
                if credentials is None
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise OSError(f"{address} cannot be bound") from error
        self.endpoint = f"127.0.0.1:{bound}"
        """For Client and AsyncClient."""

    def refuse(self, error: APIError, times: int = 1) -> None:
        """The next `times` generations, or tries to resume one, are answered with `error`."""
        with self._lock:
            self._refusals.extend([error] * times)

    def break_off(self, *tokens: int, error: APIError | None = None) -> None:
        """The streams of the next generations, one for each number, break after so many tokens of all their answers.

        They break with `error`, by default as if the server had gone, so that the SDK resumes them. A resumed stream
        counts as the next one.
        """
        with self._lock:
            self._breaks.extend((count, error or UnavailableError("broken off on purpose")) for count in tokens)

    def close(self) -> None:
        """Stops serving; streams that still run break."""
        self._server.stop(None).wait()
        self._threads.shutdown(wait=False)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self, request: Request) -> tuple[Said, tuple[int, APIError] | None]:
        """What to say, and when to break off if at all. Raises what the test asked for."""
        with self._lock:
            self.requests.append(request)
            if self._refusals:
                raise self._refusals.popleft()
            said = self._said.get(request.request_id) if request.resumed else None
            breaks = self._breaks.popleft() if self._breaks else None
        if said is None:
            said = self._answer(request)
        with self._lock:
            self._said[request.request_id] = said
        return said, breaks

    def _answer(self, request: Request) -> Said:
        if callable(self._answers):
            return self._answers(request)
        if request.prompt not in self._answers:
            raise InvalidRequestError.of("prompt", f"{request.prompt[:60]!r}; the fake gateway has no answer for it")
        return self._answers[request.prompt]


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """The gRPC side of a FakeGateway."""

    def __init__(self, gateway: FakeGateway) -> None:
        self._gateway = gateway

    def Generate(
        self, message: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        gone = threading.Event()
        context.add_callback(gone.set)
        try:
            request = _request(message, context)
            said, breaks = self._gateway._accept(request)
            each = _each(message, said)
            left, error = breaks or (-1, None)
            yield _started(message, request, self._gateway._model)
            for response in _messages(message, request, each):
                if gone.wait(self._gateway._delay):
                    return
                if error is not None and left == 0:
                    raise error
                left -= response.HasField("chunk")
                yield response
            if error is not None:
                raise error
        except APIError as failure:
            _fail(context, failure)

    def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.ModelInfo(name=self._gateway._model, max_model_len=2**20, vocab_size=VOCAB_SIZE)
        return inference_pb2.ListModelsResponse(models=[model])

    def GetStatus(
        self, message: inference_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetStatusResponse:
        return inference_pb2.GetStatusResponse(policy="off")


def _fail(context: grpc.ServicerContext, error: APIError) -> None:
    code, text, details = _status.encode(error)
    context.set_trailing_metadata(((_status.DETAILS_KEY, details),))
    context.abort(grpc.StatusCode[code], text)


def _request(message: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Request:
    options: dict[str, Any] = {}
    for descriptor, value in message.sampling.ListFields():
        plural = hasattr(value, "extend") or hasattr(value, "update")
        options[descriptor.name] = (dict(value) if hasattr(value, "update") else list(value)) if plural else value
    if "rule" in options:
        options["rule"] = types_pb2.Rule.Name(options["rule"]).removeprefix("RULE_").lower()
    talk = tuple(Message(item.role, item.content) for item in message.messages)
    held = (message.resume.token_ids, *(more.token_ids for more in message.resume.more))
    ids = tuple(message.prompt_token_ids)
    return Request(
        prompt=talk[-1].content if talk else _spell(ids) if ids else message.prompt,
        messages=talk,
        prompt_token_ids=ids,
        options=options,
        request_id=message.request_id or uuid.uuid4().hex,
        model=message.model,
        resumed=tuple(map(tuple, held)) if message.HasField("resume") else (),
        attempt=message.resume.attempt + 1 if message.HasField("resume") else 0,
        metadata={key: str(value) for key, value in context.invocation_metadata() or ()},
    )


def _spell(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < VOCAB_SIZE).decode(errors="replace")


def _started(message: inference_pb2.GenerateRequest, request: Request, model: str) -> inference_pb2.GenerateResponse:
    started = inference_pb2.Started(
        request_id=request.request_id,
        model=model,
        prompt_token_ids=request.prompt_token_ids or request.prompt.encode(),
        seed=message.resume.seed if request.attempt else message.sampling.seed,
        rule=message.resume.rule or message.sampling.rule or types_pb2.RULE_MATCH,
        attempt=request.attempt,
    )
    return inference_pb2.GenerateResponse(started=started)


def _each(message: inference_pb2.GenerateRequest, said: Said) -> list[str | bytes]:
    """What each of the n answers says."""
    count = max(1, message.sampling.n)
    each = [said] * count if isinstance(said, str | bytes) else list(said)
    if len(each) != count:
        raise InvalidRequestError.of("sampling.n", f"{count}; the fake gateway was given {len(each)} answers")
    return each


def _messages(
    message: inference_pb2.GenerateRequest, request: Request, each: Sequence[str | bytes]
) -> Iterator[inference_pb2.GenerateResponse]:
    """The answers side by side, a token of each in turn, from where a resumed client stands."""
    held = request.resumed or ((),) * len(each)
    running = [_answer(message, index, said, held[index]) for index, said in enumerate(each)]
    while running:
        still = []
        for answer in running:
            response = next(answer)
            yield response
            if not response.HasField("finished"):
                still.append(answer)
        running = still


def _answer(
    message: inference_pb2.GenerateRequest, index: int, said: str | bytes, held: Sequence[int]
) -> Iterator[inference_pb2.GenerateResponse]:
    """Chunks of one answer after the `held` ids, and its end. Text waits for whole characters, as a cluster's does."""
    sampling = message.sampling
    whole = said.encode() if isinstance(said, str) else said
    ids = whole[: sampling.max_tokens] if sampling.HasField("max_tokens") else whole
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for position, token in enumerate(ids):
        text = decoder.decode(bytes([token]))
        if position < len(held):
            continue
        chunk = inference_pb2.Chunk(token_ids=[token], text=text, index=index)
        if sampling.HasField("logprobs"):
            chunk.logprobs.append(_logprobs(token, sampling.logprobs))
        yield inference_pb2.GenerateResponse(chunk=chunk)
    steps = max(0, len(ids) - max(1, len(held)))
    finished = inference_pb2.Finished(
        reason=types_pb2.FINISH_REASON_STOP if len(ids) == len(whole) else types_pb2.FINISH_REASON_LENGTH,
        text=decoder.decode(b"", final=True),
        stats=types_pb2.GenerationStats(steps=steps, committed=steps, k_hist=[steps]),
        completion_tokens=len(ids),
        index=index,
    )
    yield inference_pb2.GenerateResponse(finished=finished)


def _logprobs(token: int, count: int) -> types_pb2.TokenLogprobs:
    """Made up, but the same each time: the token that was produced is the likeliest."""
    first = -(token + 1) / VOCAB_SIZE
    top = [((token + i) % VOCAB_SIZE, first - i) for i in range(count)]
    return types_pb2.TokenLogprobs(
        logprob=first, top_token_ids=[index for index, _ in top], top_logprobs=[value for _, value in top]
    )
