"""Convolution over the slots of a draft block with weights that depend on the row, in plain torch: the reference."""

from __future__ import annotations

from torch import Tensor


def local_convolution(z: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """z [R, m, h], base [t, h], dynamic [R, m, t, G] -> [R, m, h]: sum over taps i < t of weight * z[:, j - i].

    The weight of output row j and channel c is base[i, c] + dynamic[:, j, i, c // (h / G)]. Rows before a block's first
    count as zeros: no block sees another. (Draft-model contracts, section 4.1.)
    """
    blocks, slots, hidden = z.shape
    groups = dynamic.shape[-1]
    out = z * base[0]
    grouped, source = (x.view(blocks, slots, groups, hidden // groups) for x in (out, z))
    grouped.addcmul_(dynamic[:, :, 0, :, None], source)
    for tap in range(1, min(len(base), slots)):
        out[:, tap:].addcmul_(z[:, :-tap], base[tap])
        grouped[:, tap:].addcmul_(dynamic[:, tap:, tap, :, None], source[:, :-tap])
    return out
