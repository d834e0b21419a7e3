"""What a module keeps: parameters, persistent buffers, and what it adds to its `state_dict` itself.

The last kind has no tensor that stays: states of metrics, or entries that an override of
`_save_to_state_dict` makes up. They are asked for again each time, and given back by
`load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hetero_fw.errors import CheckpointError

MODEL_PREFIX = "model."

# Wrappers that rename parameters without changing them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def canonical_fqn(fqn: str) -> str:
    """The name of a parameter without the wrappers of compilation and recomputation."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of a persistent buffer, which may be None.

    Attributes:
        name: in checkpoints.
        owner: the submodule that has it.
        key: there.
    """

    name: str
    owner: nn.Module
    key: str

    @property
    def buffer(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.key)


class ModuleState:
    """A module's tensors by their names in checkpoints; what is tied has several.

    Make it between two steps: while a step computes, FSDP has other tensors in the places of its
    parameters.

    Attributes:
        parameters: by name, the module's own.
        modules: prefix and submodule of each; what is shared has several.

    Args:
        module: sharded already, if it is going to be.

    Raises:
        CheckpointError: the module keeps state that is no tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        entries = model_tensors(module, keep_vars=True)
        parameters = {
            f"{MODEL_PREFIX}{canonical_fqn(fqn)}": parameter
            for fqn, parameter in module.named_parameters(remove_duplicate=False)
        }
        self.modules = tuple(module.named_modules(remove_duplicate=False))
        buffers = self.buffers()
        self.parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if entries.get(name) is parameter
        }
        self._added = {
            name
            for name, value in entries.items()
            if value is not self.parameters.get(name) and value is not buffers.get(name)
        }
        self._adders = self._find_adders(module)

    def slots(self) -> Iterator[Slot]:
        """Those that are registered now."""
        for prefix, owner in self.modules:
            if owner._buffers:
                for key in owner._buffers.keys() - owner._non_persistent_buffers_set:
                    yield Slot(name=state_name(prefix, key), owner=owner, key=key)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers as they are now. One may replace another."""
        return {slot.name: buffer for slot in self.slots() if (buffer := slot.buffer) is not None}

    def added(self) -> dict[str, torch.Tensor]:
        """What the module adds itself, as it is now; copies. Between two steps.

        Raises:
            CheckpointError: it is no tensor any more.
        """
        if not self._adders:
            return {}
        known = self.parameters.keys() | self.buffers().keys()
        added = {
            name: value.detach().clone()
            for prefix, adder in self._adders
            for name, value in model_tensors(adder, prefix=prefix).items()
            if name in self._added or name not in known
        }
        self._added |= added.keys()
        return added

    def without_added(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `tensors` that the module has not added itself."""
        return {name: tensor for name, tensor in tensors.items() if name not in self._added}

    def _find_adders(self, module: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
        """The submodules to ask: the others may have a lot to say."""
        found = {}
        for name in self._added:
            above = (place for place in self.modules if name.startswith(state_name(place[0], "")))
            prefix, adder = max(above, key=lambda place: len(place[0]))
            found[prefix] = adder
        told = {
            name
            for prefix, adder in found.items()
            for name in model_tensors(adder, prefix=f"{prefix}." if prefix else "")
        }
        if not self._added <= told:  # a hook of a module above adds them
            found = {"": module}
        return tuple((f"{prefix}." if prefix else "", adder) for prefix, adder in found.items())


def model_tensors(
    module: nn.Module, *, prefix: str = "", keep_vars: bool = False
) -> dict[str, torch.Tensor]:
    """Parameters, persistent buffers and what else the module's `state_dict` lists.

    Args:
        module: sharded or not.
        prefix: of its names, with a dot at the end; as of `state_dict`.
        keep_vars: as of `state_dict`: the parameters themselves, not what shares their values.

    Raises:
        CheckpointError: the module keeps state that is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    for fqn, value in module.state_dict(prefix=prefix, keep_vars=keep_vars).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{fqn} of the module is no tensor ({type(value).__name__}); "
                "keep extra state in a buffer."
            )
        tensors[f"{MODEL_PREFIX}{canonical_fqn(fqn)}"] = value
    return tensors


def give_back(module: nn.Module, added: Mapping[str, torch.Tensor]) -> None:
    """Let the module take what it has added to a state; all else stays as it is.

    Args:
        added: all of it, by name; if there is none, nothing happens.

    Raises:
        CheckpointError: the module does not take what it has given.
    """
    if not added:
        return
    # All entries, as an override of `_load_from_state_dict` may expect them.
    state = {
        fqn: added.get(f"{MODEL_PREFIX}{canonical_fqn(fqn)}", value)
        for fqn, value in module.state_dict(keep_vars=True).items()
    }
    try:
        module.load_state_dict(state)
    except Exception as error:  # of the user's code
        names = ", ".join(sorted(name.removeprefix(MODEL_PREFIX) for name in added))
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"the module adds {names} to its state_dict and does not take that back "
            f"({type(error).__name__}: {text}); keep it in a buffer."
        ) from error


def check_module(module: nn.Module) -> list[str]:
    """Look whether a checkpoint can hold what `module` keeps, and give it back.

    Args:
        module: not trained yet, not on the meta device.

    Returns:
        names of what it adds to its `state_dict` itself.

    Raises:
        CheckpointError: it cannot.
    """
    added = ModuleState(module).added()
    give_back(module, added)
    return sorted(name.removeprefix(MODEL_PREFIX) for name in added)


def state_name(prefix: str, key: str) -> str:
    """Name in checkpoints of `key` of the submodule at `prefix`."""
    return f"{MODEL_PREFIX}{canonical_fqn(f'{prefix}.{key}' if prefix else key)}"
