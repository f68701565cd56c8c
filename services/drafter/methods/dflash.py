"""DFlash: a block in one pass, each position drawn by itself."""

from services.drafter.methods.block import BlockMethod


class Method(BlockMethod):
    """Convolutions and selector are absent from its checkpoints."""

    kind = "dflash"
