"""Tensors and arrays as JSON values, and back.

Numbers are written as such, complex ones in pairs, times as the integers that they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_Array = npt.NDArray[Any]


def write_tensor(value: Tensor, tag: str) -> dict[str, Any]:
    """The numbers of a tensor under `tag`, and with them what it takes to make the same again.

    Raises:
        TypeError: it is more than its own numbers.
    """
    if isinstance(value, DTensor) or value.layout is not torch.strided or value.is_quantized:
        raise TypeError("only plain dense tensors have a form in JSON")
    numbers = value.detach()
    if value.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    written = {tag: numbers.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    # Nested lists do not tell the shape of nothing.
    return written | ({"shape": list(value.shape)} if value.numel() == 0 else {})


def read_tensor(value: dict[str, Any], tag: str) -> Tensor:
    """Inverse of `write_tensor`.

    Raises:
        TypeError: it names something else than a type of numbers.
    """
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value['dtype']} is no type of tensors")
    if "shape" in value:
        return torch.empty(value["shape"], dtype=dtype)
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(value[tag], dtype=dtype.to_real()))
    return torch.tensor(value[tag], dtype=dtype)


def write_array(value: _Array, tag: str) -> dict[str, Any]:
    """The same for an array.

    Raises:
        TypeError: it is of Python objects, has fields or a mask, or more digits than JSON has.
    """
    kind, is_long = value.dtype.kind, value.dtype.char in "gG"
    if kind not in "biufcUMm" or is_long or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"dtype {value.dtype} has no form in JSON")
    dtype = value.dtype.newbyteorder("=")
    numbers = value.astype(dtype)
    if kind == "c":
        numbers = np.stack([value.real, value.imag], axis=-1)
    if kind in "Mm":
        numbers = numbers.view(np.int64)
    written = {tag: numbers.tolist(), "dtype": dtype.str if kind in "UMm" else dtype.name}
    return written | ({"shape": list(value.shape)} if value.size == 0 else {})


def read_array(value: dict[str, Any], tag: str) -> _Array:
    """Inverse of `write_array`."""
    dtype = np.dtype(value["dtype"])
    if "shape" in value:
        return np.empty(value["shape"], dtype=dtype)
    if dtype.kind == "c":
        parts = np.array(value[tag], dtype=f"f{dtype.itemsize // 2}")
        return np.asarray(parts.view(dtype)[..., 0])
    if dtype.kind in "Mm":
        return np.array(value[tag], dtype=np.int64).view(dtype)
    return np.array(value[tag], dtype=dtype)
