"""Configuration of a drafter replica."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from services.drafter.methods import check_kind
from services.runtime.config import ModelConfig, ServiceConfig


class DrafterConfig(ServiceConfig):
    """The [drafter] table."""

    model: ModelConfig | None = None
    """The target; kinds with weights need it."""
    kind: str = "ngram"
    """Which method drafts; exactly one."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options, checked by the method."""
    max_draft_tokens: int = Field(16, ge=1, le=256)
    """Longest draft; wishes for more get this many."""
    max_sessions: int = Field(1024, ge=1)
    """Most sessions at a time, over all verifiers."""
    kv_tokens: int = Field(65536, ge=64)
    """Tokens of context that kinds with weights keep, over all sessions."""
    heartbeat_seconds: float = Field(1.0, gt=0)
    """Between heartbeats on Draft streams; a verifier that misses two is dead."""

    @field_validator("kind", mode="before")
    @classmethod
    def _one_known_kind(cls, kind: Any) -> str:
        return check_kind(kind)
