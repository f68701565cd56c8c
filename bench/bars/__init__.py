"""One file per group of bars."""
