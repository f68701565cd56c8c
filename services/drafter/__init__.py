"""Proposes tokens."""
