"""Between protobuf messages and the scheduler's plain types; the only place that knows both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kadence.internal import common_pb2, control_pb2, verifier_pb2
from kadence.v1 import inference_pb2, types_pb2
from services.runtime.server import MAX_MESSAGE_BYTES
from services.scheduler.fleet import Description, Load, Replica
from services.scheduler.outcomes import End, FinishReason, Logprobs, Piece, Stats, Terminal, Update
from services.scheduler.policy import Epoch, Policy
from services.scheduler.request import Ask, Limits, Options, Request, Resume, Rule, Sampling
from services.scheduler.session import Session

# Fields of SamplingOptions that may be absent: those that share their name with one of Options and are not lists.
_OPTIONAL = [f.name for f in types_pb2.SamplingOptions.DESCRIPTOR.fields if f.has_presence]
_SEEDS, _SEED_STEP = 2**64, 0x9E3779B97F4A7C15  # far apart, so that they do not meet other requests' seeds


def ask(request: inference_pb2.GenerateRequest) -> Ask:
    """What a client asked."""
    return Ask(
        request_id=request.request_id,
        model=request.model,
        prompt=request.prompt if request.HasField("prompt") else None,
        messages=tuple((message.role, message.content) for message in request.messages),
        prompt_token_ids=tuple(request.prompt_token_ids),
        options=_options(request.sampling),
        resume=_resume(request.resume) if request.HasField("resume") else None,
    )


def _resume(resume: inference_pb2.Resume) -> Resume:
    more = tuple(tuple(answer.token_ids) for answer in resume.more)
    return Resume(tuple(resume.token_ids), resume.seed, resume.attempt, resume.rule, more)


def _options(sampling: types_pb2.SamplingOptions) -> Options:
    given: dict[str, Any] = {name: getattr(sampling, name) for name in _OPTIONAL if sampling.HasField(name)}
    return Options(
        **given,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        rule=sampling.rule,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(sampling.bad_words),
    )


def started(request: Request, model: str, attempt: int) -> inference_pb2.GenerateResponse:
    """The first message of a stream."""
    message = inference_pb2.Started(
        request_id=request.request_id,
        model=model,
        prompt_token_ids=request.prompt_token_ids,
        seed=request.sampling.seed,
        rule=types_pb2.Rule.Name(request.sampling.rule),
        attempt=attempt,
    )
    return inference_pb2.GenerateResponse(started=message)


def chunk(piece: Piece) -> inference_pb2.GenerateResponse:
    """Tokens and the text they complete."""
    logprobs = [
        types_pb2.TokenLogprobs(logprob=p.logprob, top_token_ids=p.top_ids, top_logprobs=p.top) for p in piece.logprobs
    ]
    message = inference_pb2.Chunk(token_ids=piece.token_ids, text=piece.text, logprobs=logprobs, index=piece.index)
    return inference_pb2.GenerateResponse(chunk=message)


def finished(end: End, prompt_tokens: int) -> inference_pb2.GenerateResponse:
    """The last message of an answer."""
    message = inference_pb2.Finished(
        reason=types_pb2.FinishReason.Name(end.reason),
        text=end.text,
        stats=_stats(end.stats),
        stop_match=end.stop_match,
        prompt_tokens=prompt_tokens,
        completion_tokens=end.completion_tokens,
        index=end.index,
    )
    return inference_pb2.GenerateResponse(finished=message)


def _stats(stats: Stats) -> types_pb2.GenerationStats:
    return types_pb2.GenerationStats(
        steps=stats.steps,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        k_hist=stats.k_hist,
        committed=stats.committed,
        cached_tokens=stats.cached_tokens,
    )


def submit(session: Session) -> verifier_pb2.Submit:
    """An answer for a verifier to produce, at its present attempt."""
    request = session.request
    return verifier_pb2.Submit(
        stamp=stamp(request.key, session.attempt, session.length),
        prompt_token_ids=request.prompt_token_ids,
        committed_token_ids=session.answer.token_ids,
        sampling=_sampling(request.sampling, len(session.answer.token_ids)),
    )


def _sampling(s: Sampling, committed: int) -> common_pb2.Sampling:
    # Rule `ratio` is exact only if an attempt's noise is new to the text it goes on from. A client does not know how
    # often its stream moved, and so may name an attempt again when it resumes; the tokens it holds tell the two apart.
    seed = s.seed if s.rule is not Rule.RATIO else (s.seed + committed * _SEED_STEP) % _SEEDS
    return common_pb2.Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=seed,
        max_tokens=s.max_tokens,
        stop_token_ids=s.stop_token_ids,
        rule=types_pb2.Rule.Name(s.rule),
        max_draft_tokens=s.max_draft_tokens,
        priority=s.priority,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=s.logit_bias,
        allowed_token_ids=s.allowed_token_ids,
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in s.bad_words],
        min_tokens=s.min_tokens,
        logprobs=s.logprobs,
    )


def stamp(request_id: str, attempt: int, base_length: int = 0) -> common_pb2.Stamp:
    """Names a request's work."""
    return common_pb2.Stamp(request_id=request_id, attempt=attempt, base_length=base_length)


def stop(request_id: str, attempt: int) -> verifier_pb2.Stop:
    """Ends a request at its verifier."""
    return verifier_pb2.Stop(stamp=stamp(request_id, attempt))


def decode_request(
    submits: Iterable[verifier_pb2.Submit] = (),
    stops: Iterable[verifier_pb2.Stop] = (),
    *,
    scheduler_id: str = "",
    heartbeat: int = 0,
) -> verifier_pb2.DecodeRequest:
    """Everything for one verifier that is due now."""
    beat = common_pb2.Heartbeat(sequence=heartbeat) if heartbeat else None
    return verifier_pb2.DecodeRequest(submits=submits, stops=stops, scheduler_id=scheduler_id, heartbeat=beat)


def update(message: verifier_pb2.RequestUpdate) -> Update:
    """One request's progress."""
    terminal = None
    if message.HasField("terminal"):
        end = message.terminal
        # An unset stop_token_id reads as 0, which may be a real id: it counts only where a stop id ended the answer.
        stop_id = end.stop_token_id if end.reason == FinishReason.STOP else -1
        terminal = Terminal(FinishReason(end.reason or FinishReason.FAILED), stop_id, end.error_code, end.error_message)
    return Update(
        message.stamp.base_length,
        list(message.token_ids),
        message.drafted,
        message.verified,
        message.accepted,
        message.decode_step,
        message.cached_tokens,
        terminal,
        tuple(Logprobs(p.logprob, tuple(p.top_token_ids), tuple(p.top_logprobs)) for p in message.logprobs),
    )


def description(message: common_pb2.Description) -> Description:
    """What a replica says it is."""
    return Description(
        kind=message.kind,
        replica_id=message.replica_id,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        vocab_size=message.vocab_size,
        drafter_kind=message.drafter_kind,
        max_sessions=message.max_sessions,
        max_model_len=message.max_model_len,
    )


def ourselves(scheduler_id: str, limits: Limits, version: str) -> common_pb2.Description:
    """What we say we are."""
    return common_pb2.Description(
        kind="scheduler",
        replica_id=scheduler_id,
        model=limits.model,
        vocab_size=limits.vocab_size,
        max_message_bytes=MAX_MESSAGE_BYTES,
        version=version,
    )


def replica(register: control_pb2.Register) -> tuple[Replica, Epoch]:
    """A registering replica, and the epoch of the policy it holds (0:0 if none)."""
    new = Replica(description(register.description), register.address, register.metrics_address, register.pid)
    return new, epoch(register.held_policy.epoch)


def load(message: control_pb2.Load) -> Load:
    """A replica's report."""
    return Load(
        running=message.running,
        waiting=message.waiting,
        outstanding_tokens=message.outstanding_tokens,
        kv_pages_used=message.kv_pages_used,
        kv_pages_total=message.kv_pages_total,
        stats=message.stats,
        policy_epoch=epoch(message.policy_epoch),
        drafter=message.drafter,
        drafter_problem=message.drafter_problem,
    )


def epoch(message: control_pb2.PolicyEpoch) -> Epoch:
    """When a policy was made."""
    return Epoch(message.boot_id, message.counter)


def registered(scheduler_id: str, heartbeat_seconds: float) -> control_pb2.AttachResponse:
    """Accepts a replica."""
    message = control_pb2.Registered(scheduler_id=scheduler_id, heartbeat_seconds=heartbeat_seconds)
    return control_pb2.AttachResponse(registered=message)


def policy(value: Policy, at: Epoch) -> control_pb2.AttachResponse:
    """The policy from now on."""
    made = control_pb2.PolicyEpoch(boot_id=at.boot_id, counter=at.counter)
    message = control_pb2.Policy(epoch=made, name=value.name, max_draft_tokens=value.max_draft_tokens)
    return control_pb2.AttachResponse(policy=message)


def drafters(replicas: Iterable[Replica]) -> control_pb2.AttachResponse:
    """The drafters a verifier may use."""
    peers = [control_pb2.Peer(replica_id=r.id, address=r.address) for r in replicas]
    return control_pb2.AttachResponse(drafters=control_pb2.Peers(peers=peers))


def heartbeat(sequence: int) -> control_pb2.AttachResponse:
    """A sign of life."""
    return control_pb2.AttachResponse(heartbeat=common_pb2.Heartbeat(sequence=sequence))


def models(limits: Limits, drafter_kind: str) -> inference_pb2.ListModelsResponse:
    """The model served."""
    info = inference_pb2.ModelInfo(
        name=limits.model,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        drafter_kind=drafter_kind,
    )
    return inference_pb2.ListModelsResponse(models=[info])


def replica_status(r: Replica) -> inference_pb2.ReplicaStatus:
    """A replica for people."""
    d, now = r.description, r.load
    return inference_pb2.ReplicaStatus(
        replica_id=r.id,
        kind=r.kind,
        address=r.address,
        state=r.state,
        serves=d.drafter_kind if r.kind == "drafter" else d.model,
        metrics_address=r.metrics_address,
        http_address=r.http_address,
        pid=r.pid,
        running=now.running,
        waiting=now.waiting,
        kv_pages_used=now.kv_pages_used,
        kv_pages_total=now.kv_pages_total,
        stats=now.stats if isinstance(now.stats, types_pb2.GenerationStats) else None,
        policy_epoch=str(now.policy_epoch) if now.policy_epoch.boot_id else "",
        drafter=now.drafter,
        drafter_problem=now.drafter_problem,
    )
