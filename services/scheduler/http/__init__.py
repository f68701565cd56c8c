"""The OpenAI-compatible HTTP API, served by the scheduler in its own event loop."""
