"""Fast operations, each beside its plain-torch reference."""
