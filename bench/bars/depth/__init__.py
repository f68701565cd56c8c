"""Depth: every option exact under speculation, prefixes reused, pages never short, and the door people already know."""
