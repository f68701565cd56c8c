"""Kadence: speculative decoding as a cluster. SDK surface; see `Client` and `AsyncClient`."""
