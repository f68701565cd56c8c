"""Configuration of the scheduler."""

from __future__ import annotations

from pydantic import Field, field_validator

from kadence.errors import ConfigError
from services.runtime.config import Frozen, ModelConfig, ServiceConfig
from services.scheduler import policy


class PolicyConfig(Frozen):
    """How many drafted tokens are verified."""

    name: str = "fixed:7"
    """ "off" or "fixed:K"."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            policy.parse(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name


class SchedulerConfig(ServiceConfig):
    """The scheduler: what it serves, how much it takes on, how long it waits."""

    model: ModelConfig
    policy: PolicyConfig = PolicyConfig()
    http_port: int = Field(0, ge=-1, le=65535)
    """Port of the OpenAI-compatible HTTP API, on the same host; 0 takes a free one, -1 switches it off."""
    max_queue: int = Field(256, ge=0, le=100_000)
    """Requests that may wait for a verifier; one more is refused with RESOURCE_EXHAUSTED."""
    max_in_flight: int = Field(256, ge=1, le=100_000)
    """Requests that all verifiers together may have at once; each is also bounded by its own capacity."""
    default_max_tokens: int = Field(1024, ge=1)
    """Tokens to produce when neither a request nor the model's defaults say; clipped to the context."""
    generation_defaults: bool = True
    """Whether options that a request leaves out come from the model's generation_config.json, if it has one."""
    default_timeout_seconds: float = Field(600.0, gt=0)
    """Deadline of a request whose client set none."""
    attach_wait_seconds: float = Field(60.0, ge=0, le=3600)
    """How long a request waits while no verifier is attached, before it fails with UNAVAILABLE; outlasts a restart."""
    heartbeat_seconds: float = Field(1.0, ge=0.01, le=60)
    """Interval of heartbeats; a replica that misses two is lost."""
    max_chunks_per_second: int = Field(1000, ge=1)
    """Messages to all clients together; tokens of a busy cluster travel in fewer, larger chunks."""
