"""How two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from hetero_fw.checkpoint.loading import fill_tensors
from hetero_fw.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from hetero_fw.checkpoint.storage import StoragePath


class Likeness(StrEnum):
    """How a tensor of one checkpoint compares with that of the same name in the other."""

    EQUAL = "equal"
    DIFFERENT = "different"
    OTHER_SHAPE = "other_shape"
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tensor, by its name in the checkpoint.

    Attributes:
        max_abs_difference: of any two elements; None unless sizes and dtypes are the same.
        detail: both sizes and dtypes where they differ.
    """

    fqn: str
    likeness: Likeness
    max_abs_difference: float | None = None
    detail: str = ""


def compare_checkpoints(path_a: StoragePath, path_b: StoragePath) -> Iterator[TensorDifference]:
    """Compare two checkpoint directories in the order of names, one tensor in memory at a time.

    Raises:
        CheckpointError: one of them is damaged.
    """
    manifest_a, manifest_b = read_manifest(path_a), read_manifest(path_b)
    for fqn in sorted(manifest_a.tensors.keys() | manifest_b.tensors.keys()):
        a, b = manifest_a.tensors.get(fqn), manifest_b.tensors.get(fqn)
        if a is None or b is None:
            yield TensorDifference(
                fqn=fqn, likeness=Likeness.ONLY_IN_B if a is None else Likeness.ONLY_IN_A
            )
        elif (a.size, a.dtype) != (b.size, b.dtype):
            yield TensorDifference(
                fqn=fqn, likeness=Likeness.OTHER_SHAPE, detail=f"{_shape(a)} and {_shape(b)}"
            )
        else:
            yield _compare(fqn, _read(path_a, manifest_a, fqn), _read(path_b, manifest_b, fqn))


def _read(path: StoragePath, manifest: Manifest, fqn: str) -> torch.Tensor:
    entry = manifest.tensors[fqn]
    tensors = {fqn: torch.empty(entry.size, dtype=entry.torch_dtype)}
    fill_tensors(path, manifest, tensors)
    return tensors[fqn]


def _compare(fqn: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    # Bits are compared first: infinities in a mask are equal, though their difference is not zero.
    if torch.equal(_bytes(a), _bytes(b)):
        return TensorDifference(fqn=fqn, likeness=Likeness.EQUAL, max_abs_difference=0.0)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    difference[_bytewise_equal(a, b)] = 0.0
    return TensorDifference(
        fqn=fqn, likeness=Likeness.DIFFERENT, max_abs_difference=float(difference.max())
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _bytewise_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    same = _bytes(a).eq(_bytes(b)).view(-1, a.dtype.itemsize)
    return same.all(dim=1).view(a.shape)


def _shape(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.size)}"
