"""The bars: a package per group, in it a module per capability that measures it; `bar.py` says what a bar is.

A new group is a package here, a new capability a module in it with

    MINUTES = 3  # about how long it takes; quick ones run first
    async def measure(bench: Bench) -> AsyncIterator[Bar]

Each module is measured in a process of its own. Bars measure; they never move themselves.
"""
