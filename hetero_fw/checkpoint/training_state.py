"""From a checkpoint back to the state of a module and its optimizer.

Any number of ranks can restore what any other number saved: see `live_state` for the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroup
from torch.optim import Optimizer

from hetero_fw.checkpoint.adoption import added_room, adopt_buffers
from hetero_fw.checkpoint.filling import Filled
from hetero_fw.checkpoint.found import FoundCheckpoint
from hetero_fw.checkpoint.live_state import (
    OPTIMIZER_STATE,
    optimized,
)
from hetero_fw.checkpoint.loading import fill_from, load_from, read_manifest_together
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.module_state import ModuleState, give_back
from hetero_fw.checkpoint.optimizer_state import (
    OPTIMIZER_CLASS,
    create_tensors,
    install_state,
    optimizer_class,
)
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.errors import CheckpointError


def restore_training_state(
    module: nn.Module,
    optimizer: Optimizer | None,
    path: StoragePath,
    *,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load the checkpoint at `path` into `module` and `optimizer`; return its `state`.

    The optimizer may be new: its state is created from the names in the manifest, laid out like
    its parameters. A checkpoint without optimizer state leaves the optimizer as it is; the
    returned state then has no key `optimizer`. So does one of an optimizer of another class, whose
    state would mean nothing to this one. With `process_group`, all its ranks call this.

    Raises:
        CheckpointError: as `load_checkpoint`; on all ranks if on one. Or the optimizer's
            `load_state_dict` has raised.
    """
    ranks = Ranks(process_group)
    manifest = read_manifest_together(path, ranks)
    return _restore(
        module,
        optimizer,
        manifest,
        ranks,
        path=str(path),
        fill=lambda tensors: load_from(path, manifest, tensors, ranks),
    )


def restore_found_state(
    module: nn.Module, optimizer: Optimizer | None, found: FoundCheckpoint
) -> tuple[dict[str, Any], Filled]:
    """As `restore_training_state`, from a checkpoint that all ranks have found together.

    All of them call this.

    Returns:
        Its `state`, and what it took.

    Raises:
        CheckpointError: as `fill_from`. After a DamagedCheckpointError the module is filled in
            part: build another.
    """
    filled: list[Filled] = []
    state = _restore(
        module,
        optimizer,
        found.manifest,
        found.ranks,
        path=found.path,
        fill=lambda tensors: filled.append(fill_from(found, tensors)),
    )
    return state, filled[0]


def _restore(
    module: nn.Module,
    optimizer: Optimizer | None,
    manifest: Manifest,
    ranks: Ranks,
    *,
    path: str,
    fill: Callable[[Mapping[str, torch.Tensor]], None],
) -> dict[str, Any]:
    created = ranks.succeed_together(lambda: _create_state(module, optimizer, manifest, path))
    own = ModuleState(module)
    added = added_room(own, manifest)
    fill({**own.parameters, **own.buffers(), **added, **created})
    ranks.succeed_together(lambda: give_back(module, added))
    if optimizer is not None and _is_for(optimizer, manifest):
        names = _names(module, optimizer)
        install_state(optimizer, names, created, manifest.state[OPTIMIZER_STATE])
    return dict(manifest.state)


def _create_state(
    module: nn.Module, optimizer: Optimizer | None, manifest: Manifest, path: str
) -> dict[str, torch.Tensor]:
    """Optimizer state to load into; checks everything that can be checked before."""
    adopt_buffers(module, manifest)
    if optimizer is None or not _is_for(optimizer, manifest):
        return {}
    names = _names(module, optimizer)
    saved_groups = [group["params"] for group in manifest.state[OPTIMIZER_STATE]["param_groups"]]
    own_groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if saved_groups != own_groups:
        raise CheckpointError(
            f"{path} holds an optimizer with other parameter groups: of "
            f"{[len(group) for group in saved_groups]} parameters, expected "
            f"{[len(group) for group in own_groups]}, with the same names in the same order."
        )
    return create_tensors(optimizer, names, manifest.tensors, manifest.state[OPTIMIZER_STATE])


def _is_for(optimizer: Optimizer, manifest: Manifest) -> bool:
    """Whether the checkpoint holds state of such an optimizer; an older release did not say."""
    saved = manifest.state.get(OPTIMIZER_STATE)
    own = optimizer_class(optimizer)
    return saved is not None and saved.get(OPTIMIZER_CLASS, own) == own


def _names(module: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    return {parameter: fqn for fqn, parameter in optimized(module, optimizer)}
