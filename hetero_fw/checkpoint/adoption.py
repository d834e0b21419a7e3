"""Whether a checkpoint is one of this module, and the buffers that it had when it was saved.

Parameters are those that the module is built with. A persistent buffer may have grown since, begin
as None or be registered in training: whether there is one, and its size, the checkpoint tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hetero_fw.checkpoint.manifest import DTYPES, Manifest
from hetero_fw.checkpoint.module_state import (
    MODEL_PREFIX,
    ModuleState,
    Slot,
    canonical_fqn,
    state_name,
)

BUFFERS = "buffers"


def record_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, list[str | int]]:
    """Which tensors of a checkpoint are buffers, with dtypes and sizes, as JSON values.

    Those without elements are among them; the checkpoint has no other trace of these.
    """
    return {
        name: [str(buffer.dtype).removeprefix("torch."), *buffer.shape]
        for name, buffer in buffers.items()
    }


def misfits(module: nn.Module, manifest: Manifest) -> list[str]:
    """How the module differs from the one that was saved, a name each; empty if it does not.

    Raises:
        CheckpointError: the module keeps state that is no tensor.
    """
    state = ModuleState(module)
    added = state.added()
    own = {
        name: tuple(tensor.shape)
        for name, tensor in (state.parameters | state.buffers() | added).items()
    }
    saved = {name: size for name, (_, size) in _saved(manifest).items()}
    # What the module adds itself is its own affair, and so is a buffer that it keeps no more.
    free = {f"{MODEL_PREFIX}{canonical_fqn(name)}" for name, _ in module.named_buffers()}
    free |= added.keys() | {slot.name for slot in _slots(state, manifest)}
    different = [name for name in saved if name not in free and own.get(name) != saved[name]]
    missing = [name for name in own.keys() - saved.keys() if 0 not in own[name]]
    return [
        f"{name.removeprefix(MODEL_PREFIX)} is {own.get(name, 'absent')}, "
        f"was {saved.get(name, 'absent')}"
        for name in sorted([*different, *missing])
    ]


def adopt_buffers(module: nn.Module, manifest: Manifest) -> None:
    """Make room in `module` for the persistent buffers that the checkpoint holds."""
    saved = _saved(manifest)
    nearby = next(module.parameters(), torch.empty(0))
    for slot in list(_slots(ModuleState(module), manifest)):
        if slot.name not in saved:
            continue
        own = slot.buffer
        dtype, size = saved[slot.name]
        if own is None or tuple(own.shape) != size:
            device = nearby.device if own is None else own.device
            slot.owner.register_buffer(slot.key, torch.empty(size, dtype=dtype, device=device))


def added_room(state: ModuleState, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Tensors for what the module has added itself, of the sizes that it had then."""
    saved = _saved(manifest)
    return {
        name: torch.empty(saved[name][1], dtype=saved[name][0], device=tensor.device)
        if name in saved
        else tensor
        for name, tensor in state.added().items()
    }


def _saved(manifest: Manifest) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and size of what the checkpoint knows of the module."""
    record = manifest.state.get(BUFFERS, {})
    return {name: (DTYPES[dtype], tuple(size)) for name, (dtype, *size) in record.items()} | {
        name: (entry.torch_dtype, tuple(entry.size))
        for name, entry in manifest.tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


def _slots(state: ModuleState, manifest: Manifest) -> Iterator[Slot]:
    """The places of persistent buffers, and those that were registered in training."""
    own = {slot.name: slot for slot in state.slots()}
    yield from own.values()
    owners = {state_name(prefix, ""): owner for prefix, owner in state.modules}
    for name in manifest.state.get(BUFFERS, {}).keys() - own.keys():
        parent, _, key = name.rpartition(".")
        owner = owners.get(f"{parent}.")
        if owner is not None and not hasattr(owner, key):
            yield Slot(name=name, owner=owner, key=key)
