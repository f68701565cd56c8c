"""The verifier's Prometheus metrics, under vLLM's names where vLLM has them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.verifier.drafting import DraftingCounters
from services.verifier.outcomes import StepReport, Totals

_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 3.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class VerifierMetrics:
    """One set per replica; `observe` brings it up to date after each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kadence_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kadence_{name}", text, labels, registry=registry)

        self._running = gauge("num_requests_running", "Requests running.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting.")
        self._pages = gauge("kv_pages", "KV pages.", "state")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1; those only cached are not.")
        self._queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens whose KV was found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens computed.")
        self._generated = counter("generation_tokens", "Tokens committed.")
        self._steps = counter("engine_steps", "Engine steps.")
        self._step_seconds = Histogram(
            "kadence_engine_step_seconds", "Time of a step.", buckets=_SECONDS, registry=registry
        )
        self._step_rows = Histogram("kadence_engine_step_rows", "Rows of a step.", buckets=_ROWS, registry=registry)
        self._preemptions = counter("num_preemptions", "Requests that gave their pages up.")
        self._drafts = counter("spec_decode_num_drafts", "Request-steps that verified a draft.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._verified = counter("spec_decode_num_verified_tokens", "Drafted tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", "position"
        )
        self._verified_k = counter("spec_decode_verified_k", "Request-steps by verified draft tokens.", "k")
        self._events = counter("drafter_events", "What went wrong with drafts.", "event")
        self._ask = counter("drafter_ask_seconds", "Time steps took to ask for drafts.")
        self._wait = counter("drafter_wait_seconds", "Time steps waited for drafts.")
        self._feature_rows = counter("drafter_feature_rows", "Feature rows sent to the drafter.")
        self._last = Totals()
        self._last_drafting = DraftingCounters()

    def observe(self, report: StepReport, drafting: DraftingCounters) -> None:
        """Adds what happened since the last call."""
        load, now, last = report.load, report.load.stats, self._last
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._pages.labels("used").set(load.pages_used)
        self._pages.labels("free").set(load.pages_total - load.pages_used)
        self._usage.set(load.pages_used / load.pages_total)
        self._prompt.inc(now.prompt_tokens - last.prompt_tokens)
        self._generated.inc(now.generated - last.generated)
        self._steps.inc(now.steps - last.steps)
        self._queries.inc(now.prefix_queries - last.prefix_queries)
        self._hits.inc(now.prefix_hits - last.prefix_hits)
        self._preemptions.inc(now.preemptions - last.preemptions)
        self._drafted.inc(now.drafted - last.drafted)
        self._verified.inc(now.verified - last.verified)
        self._accepted.inc(now.accepted - last.accepted)
        self._drafts.inc(sum(now.k_hist[1:]) - sum(last.k_hist[1:]))
        _inc_each(self._verified_k, now.k_hist, last.k_hist)
        _inc_each(self._accepted_at, now.accepted_at, last.accepted_at)
        if report.rows:
            self._step_seconds.observe(report.seconds)
            self._step_rows.observe(report.rows)
        for event in ("late", "stale", "resyncs", "lost"):
            self._events.labels(event).inc(getattr(drafting, event) - getattr(self._last_drafting, event))
        self._ask.inc(drafting.ask_seconds - self._last_drafting.ask_seconds)
        self._wait.inc(drafting.wait_seconds - self._last_drafting.wait_seconds)
        self._feature_rows.inc(drafting.rows - self._last_drafting.rows)
        self._last = now
        self._last_drafting = DraftingCounters(**vars(drafting))


def _inc_each(metric: Counter, now: list[int], last: list[int]) -> None:
    for index, count in enumerate(now):
        delta = count - (last[index] if index < len(last) else 0)
        if delta:
            metric.labels(str(index)).inc(delta)
