"""The verifier's configuration."""

from __future__ import annotations

from pydantic import Field

from services.runtime.config import ModelConfig, ServiceConfig


class VerifierConfig(ServiceConfig):
    """One verifier replica: its model, its bounds, its patience."""

    model: ModelConfig
    max_num_seqs: int = Field(64, ge=1, le=4096)
    """Most requests running at once."""
    max_num_batched_tokens: int = Field(512, ge=16, le=65536)
    """Most rows of one step; bounds prefill chunks."""
    max_prefill_tokens: int = Field(128, ge=1, le=65536)
    """Most prompt rows of a step in which any request decodes, fewer deep in a long prompt, where each takes longer;
    without decoders prompts take the whole step."""
    kv_tokens: int = Field(32768, ge=64)
    """Tokens of KV, over all requests."""
    page_size: int = Field(16, ge=1, le=256)
    """Tokens a page holds."""
    prefix_caching: bool = True
    """Whether KV of full pages is kept and reused by requests that begin with the same tokens."""
    max_model_len: int = Field(0, ge=0)
    """Longest prompt plus answer; 0 takes the model's, at most kv_tokens."""
    max_waiting: int = Field(1024, ge=1)
    """Most requests waiting to run."""
    threads: int = Field(0, ge=0, le=1024)
    """Compute threads; 0 takes OMP_NUM_THREADS, else one per available core."""
    draft_deadline_seconds: float = Field(0.2, gt=0, le=60)
    """Shortest wait for a draft, long enough that a busy machine's hiccups are not taken for a drafter that is gone; a
    step waits longer only as far as a draft is expected to gain time."""
    grace_seconds: float = Field(10.0, ge=0, le=3600)
    """How long requests of a lost scheduler are kept."""
    heartbeat_seconds: float = Field(1.0, gt=0, le=60)
    """Interval of heartbeats on permanent streams."""
