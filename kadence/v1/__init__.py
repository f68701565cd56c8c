"""Generated public contract."""
