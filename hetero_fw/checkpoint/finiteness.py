"""Values that no training goes on from."""

from __future__ import annotations

from enum import StrEnum

import torch

# Large enough to keep the per-call cost out of sight, small enough to need no large scratch.
FINITE_CHECK_ELEMENTS = 2**22


class Flaw(StrEnum):
    """What is wrong with a tensor."""

    NAN = "nan"
    INFINITY = "infinity"


def flaw_of(
    values: torch.Tensor, *, allows_infinity: bool, dtype: torch.dtype | None = None
) -> Flaw | None:
    """The first flaw in `values`, of any dtype and size; None if there is none.

    Args:
        allows_infinity: infinities are none.
        dtype: what they are looked at in, where that is another than their own.
    """
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
        dtype = None if dtype is None else dtype.to_real()
    if not values.is_floating_point() or values.numel() == 0:
        return None
    for piece in torch.split(values.detach().reshape(-1), FINITE_CHECK_ELEMENTS):
        own = piece if dtype is None else piece.to(dtype)
        # The 8-bit dtypes have no reductions of their own.
        plain = own.float() if own.dtype.itemsize == 1 else own
        # One pass without a scratch tensor: a NaN comes out of both, an infinity out of one.
        extremes = torch.stack(torch.aminmax(plain))
        if bool(extremes.isnan().any()):
            return Flaw.NAN
        if not (allows_infinity or bool(extremes.isfinite().all())):
            return Flaw.INFINITY
    return None
