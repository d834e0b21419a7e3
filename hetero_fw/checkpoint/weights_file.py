"""Full weights as one file that other programs read: safetensors out, and in again.

The names are those of the module's own `state_dict`. Reading never executes code: safetensors
holds no code, and a file of `torch.save` is read by PyTorch's restricted unpickler.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parameter import is_lazy

from hetero_fw.checkpoint.finiteness import Flaw, flaw_of
from hetero_fw.checkpoint.loading import fill_tensors
from hetero_fw.checkpoint.manifest import Manifest, read_manifest
from hetero_fw.checkpoint.module_state import (
    MODEL_PREFIX,
    ModuleState,
    canonical_fqn,
    give_back,
    model_tensors,
)
from hetero_fw.checkpoint.storage import NoRegularFileError, StoragePath, open_regular
from hetero_fw.errors import CheckpointError, did_you_mean

# A safetensors file starts with the length of its header, 8 bytes, and the header, JSON.
_HEADER_AT = 8
# How the older format of torch.save starts: with its magic number, pickled.
_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_PROBLEMS = 8


def export_weights(path: StoragePath, out: Path) -> int:
    """Write parameters and buffers of the checkpoint directory `path` to the new file `out`.

    Every byte is verified on the way. `out` appears complete or not at all.

    Returns:
        number of tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or `out` exists or cannot be written.
    """
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)]
    tensors = {
        name: torch.empty(manifest.tensors[name].size, dtype=manifest.tensors[name].torch_dtype)
        for name in names
    }
    fill_tensors(path, manifest, tensors)
    weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
    _write_new(Path(out), weights, {"format": "pt", "step": str(manifest.step)})
    return len(weights)


def import_weights(source: Path, out: Path, like: Manifest | None = None) -> int:
    """Write the weights in `source` to the new file `out`, as `export_weights` writes them.

    `out` appears complete or not at all.

    Args:
        source: whatever `load_weights` takes.
        out: a safetensors file.
        like: of a checkpoint whose names and sizes the weights must have.

    Returns:
        number of tensors.

    Raises:
        CheckpointError: `source` cannot be read, holds more than tensors or does not fit, or `out`
            exists or cannot be written.
    """
    saved = {canonical_fqn(name): tensor for name, tensor in read_weights(source).items()}
    if like is not None:
        own = {
            name.removeprefix(MODEL_PREFIX): torch.empty(
                entry.size, dtype=entry.torch_dtype, device="meta"
            )
            for name, entry in like.tensors.items()
            if name.startswith(MODEL_PREFIX)
        }
        _check_fit(saved, own, f"{source} does not fit the checkpoint of step {like.step}")
    # safetensors takes neither tied weights nor views.
    weights = {name: _own_copy(source, name, tensor) for name, tensor in saved.items()}
    _write_new(Path(out), weights, {"format": "pt"})
    return len(weights)


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill parameters and buffers of `module` from `path`, all of them and nothing else.

    A tensor that the module has under several names (tied weights) may be there under one of them
    alone, as other programs write it.

    Args:
        module: not sharded yet.
        path: a safetensors file, or a `state_dict` written by `torch.save`, alone or under the
            key `state_dict`.

    Raises:
        CheckpointError: it cannot be read, holds more than tensors, or its names or sizes are not
            those of the module, or a value is not finite, or one tensor of the module has two
            values; or the module keeps state that is no tensor; `module` is then unchanged.
    """
    saved = {canonical_fqn(name): tensor for name, tensor in read_weights(path).items()}
    own = _state_of(module)
    _check_fit(saved, own, _no_fit(path))
    parameters = _parameters_of(module)
    for name, tensor in saved.items():
        _check_finite(path, name, tensor, own[name].dtype, allows_infinity=name not in parameters)
    _check_ties(path, saved, own)
    with torch.no_grad():
        for name, tensor in saved.items():
            own[name].copy_(tensor)
    added = ModuleState(module).added().keys()
    give_back(module, {name: own[name.removeprefix(MODEL_PREFIX)] for name in added})


def check_weights_file(path: Path, module: nn.Module | None = None) -> None:
    """Look whether training can start from `path`.

    Reads all of it, a tensor at a time; a file of `torch.save` in the format before PyTorch 1.6
    at once.

    Args:
        path: as `load_weights` takes it.
        module: to fill later; may be on the meta device. Without it nothing is said of names and
            sizes, nor of infinities, which a buffer may hold.

    Raises:
        CheckpointError: it is no file of weights, it is cut short or cannot be read, it does not
            fit the module, or a tensor is no plain one or not finite, or tied weights differ;
            names that.
    """
    path = Path(path)
    own = {} if module is None else _state_of(module)
    parameters = set() if module is None else _parameters_of(module)
    tied = {name for names in _ties(own) for name in names}
    saved: dict[str, torch.Tensor] = {}
    for full_name, tensor in _each_tensor(path):
        name = canonical_fqn(full_name)
        dtype = own[name].dtype if name in own else torch.float32
        _check_finite(path, full_name, tensor, dtype, allows_infinity=name not in parameters)
        saved[name] = tensor if name in tied else torch.empty_like(tensor, device="meta")
    if module is not None:
        _check_fit(saved, own, _no_fit(path))
        _check_ties(path, saved, own)


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    # The tensors themselves: on the meta device nothing else tells which of them are tied.
    state = model_tensors(module, keep_vars=True)
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in state.items()}


def _ties(own: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check_ties(
    path: Path, saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> None:
    """Raise if a tensor that the module has under several names would get several values."""
    for names in _ties(own):
        values = {name: saved[name].to(own[name].dtype) for name in names if name in saved}
        for first, other in pairwise(values):
            if not torch.equal(values[first], values[other]):
                raise CheckpointError(
                    f"{_no_fit(path)}: {first} and {other} are one tensor there, but differ"
                )


def _parameters_of(module: nn.Module) -> set[str]:
    return {canonical_fqn(name) for name, _ in module.named_parameters(remove_duplicate=False)}


def _no_fit(path: Path) -> str:
    return f"{path} does not fit the module"


def _each_tensor(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with _foreign(path):
        with open_regular(path) as file:
            beginning = file.read(len(_OLDER))
        if beginning[_HEADER_AT:].startswith(b"{"):
            # Reads the header, and compares it with the file's size.
            with safe_open(path, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118  # it is no mapping
                    yield name, weights.get_tensor(name)
            return
        has_map = beginning != _OLDER
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=has_map)
    yield from _tensors_of(path, content).items()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file, by name.

    Raises:
        CheckpointError: it cannot be read, or holds more than tensors.
    """
    path = Path(path)
    with _foreign(path):
        with open_regular(path) as file:
            beginning = file.read(_HEADER_AT + 1)
        if beginning[_HEADER_AT:] == b"{":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    return _tensors_of(path, content)


@contextmanager
def _foreign(path: Path) -> Iterator[None]:
    """Tell what is wrong with a file that others have made."""
    try:
        yield
    except NoRegularFileError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except Exception as error:
        # Whatever a foreign file makes the unpickler raise; its advice does not apply here.
        kind = type(error).__name__
        raise CheckpointError(
            f"{path}: is neither a safetensors file nor a state_dict of tensors alone ({kind}); "
            "none of its code was run."
        ) from error


def _tensors_of(path: Path, content: Any) -> dict[str, torch.Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a state_dict.")
    odd = [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(
            f"{path}: is not a state_dict of tensors alone: {', '.join(odd[:_MAX_PROBLEMS])}."
        )
    odd = [
        f"{name} is no plain tensor" for name, tensor in content.items() if not _is_plain(tensor)
    ]
    if odd:
        raise CheckpointError(f"{path}: {'; '.join(odd[:_MAX_PROBLEMS])}.")
    return {str(name): tensor for name, tensor in content.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has values, one for each element, in an order of its own."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) in (torch.Tensor, nn.Parameter) and is_strided and not tensor.is_meta


def _check_finite(
    path: Path, name: str, tensor: torch.Tensor, dtype: torch.dtype, *, allows_infinity: bool
) -> None:
    """Raise if `tensor` holds a NaN, or what becomes infinite in `dtype` where that matters."""
    flaw = flaw_of(tensor, allows_infinity=allows_infinity, dtype=dtype)
    if flaw is Flaw.NAN:
        raise CheckpointError(f"{path}: {name} holds a NaN")
    if flaw is Flaw.INFINITY:
        raise CheckpointError(f"{path}: {name} holds a value that is infinite in {dtype}")


def _own_copy(source: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source}: {name} is no plain tensor ({reason})") from error


def _check_fit(
    saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], what: str
) -> None:
    problems = list(_misfits(saved, own))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        listed = "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(f"{what}: {listed}")


def _misfits(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name in sorted(saved.keys() - own.keys()):
        yield f"the module has no {name}.{did_you_mean(name, own)}".removesuffix(".")
    filled = {id(own[name]) for name in saved.keys() & own.keys()}
    for name in sorted(own.keys() - saved.keys()):
        if id(own[name]) in filled:
            continue
        if is_lazy(own[name]) or own[name].numel() > 0:  # a checkpoint holds no empty tensors
            yield f"{name} is missing"
    for name in sorted(saved.keys() & own.keys()):
        ours, theirs = own[name], saved[name]
        if is_lazy(ours):
            yield f"{name} has no size before the module was used"
        elif ours.shape != theirs.shape:
            yield f"{name} is {list(theirs.shape)}, expected {list(ours.shape)}"
        elif ours.dtype != theirs.dtype and not (
            ours.dtype.is_floating_point and theirs.dtype.is_floating_point
        ):
            yield f"{name} is {theirs.dtype}, expected {ours.dtype}"


def _write_new(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another name.")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_file(tensors, scratch, metadata)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype it does not hold
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    finally:
        scratch.unlink(missing_ok=True)
