"""DFlash 2: a block in one pass, with local convolutions, and a selector that walks along the candidates."""

from services.drafter.methods.block import BlockMethod


class Method(BlockMethod):
    """Everything is in the checkpoint and the common code."""

    kind = "dflash2"
