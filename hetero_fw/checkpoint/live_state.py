"""The tensors of a module and its optimizer as they are, under names that no plan changes.

Names address the state, not ranks or positions: `model.<fqn>` and `optim.<fqn>.<key>`, where
`<fqn>` is the parameter's name. See `optimizer_state` for the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hetero_fw.checkpoint.optimizer_state import flatten_optimizer
from hetero_fw.errors import CheckpointError

OPTIMIZER_STATE = "optimizer"
MODEL_PREFIX = "model."

# Wrappers that rename parameters without changing them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def canonical_fqn(fqn: str) -> str:
    """The name of a parameter without the wrappers of compilation and recomputation."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


class LiveState:
    """A training's tensors by name, looked up once and read as often as one likes.

    The module is asked when this is made, between two steps: while a step computes, FSDP has other
    tensors in the places of its parameters. The optimizer's state is read each time.

    Args:
        module: sharded already, if it is going to be.
        optimizer: None: weights and buffers only.

    Raises:
        CheckpointError: the module keeps state that is no tensor, or the optimizer has a parameter
            that is not the module's.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = model_tensors(module)
        self._buffers = tuple(_persistent_buffers(module))
        self._optimizer = optimizer
        self._optimized = tuple(optimized(module, optimizer)) if optimizer is not None else ()
        self._names = {parameter: fqn for fqn, parameter in self._optimized}
        self._parameters = tuple(module.parameters())

    @property
    def changing(self) -> frozenset[str]:
        """Names of what may change before the optimizer's next step, and of what it never does."""
        return frozenset(self._model) - {f"{MODEL_PREFIX}{fqn}" for fqn, _ in self._optimized}

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the buffers among them; some hold infinities by design."""
        return frozenset(name for name, _, _ in self._buffers)

    def flatten(
        self, *, with_optimizer: bool = True, on_lost: Callable[[str], None] | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name, and the rest as JSON values under the key `optimizer`.

        The tensors are the live ones (nothing is copied): parameters, persistent buffers and the
        optimizer's state, DTensors where the module is sharded. Pass the second value on as part
        of a checkpoint's `state`, at its top level. Without the optimizer there is none.

        Args:
            with_optimizer: whether its state is among it.
            on_lost: told what of that comes back as another type.

        Raises:
            CheckpointError: the optimizer keeps something that no checkpoint can hold.
        """
        tensors = self._model | {
            name: buffer
            for name, owner, key in self._buffers
            if (buffer := owner._buffers[key]) is not None
        }
        if self._optimizer is None or not with_optimizer:
            return tensors, {}
        kept, state = flatten_optimizer(self._optimizer, self._names, on_lost)
        return tensors | kept, {OPTIMIZER_STATE: state}

    def versions(self) -> tuple[int, ...]:
        """Changes with every write to parameters other than that of the optimizer's step.

        A write through `.data` is not seen.
        """
        return tuple(
            tensor._version
            for parameter in self._parameters
            for tensor in (parameter, getattr(parameter, "_local_tensor", parameter))
        )

    def copy_buffers(self) -> dict[str, torch.Tensor]:
        """What a forward pass may change, as it is now."""
        with torch.no_grad():
            return {
                name: buffer.detach().clone()
                for name, owner, key in self._buffers
                if (buffer := owner._buffers[key]) is not None
            }


def flatten_training_state(
    module: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """As `LiveState.flatten`, once.

    Raises:
        CheckpointError: as `LiveState` and its `flatten`.
    """
    return LiveState(module, optimizer).flatten()


def model_tensors(module: nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers.

    Args:
        module: sharded or not.
        keep_vars: as of `state_dict`: the parameters themselves, not what shares their values.

    Raises:
        CheckpointError: the module keeps state that is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    for fqn, value in module.state_dict(keep_vars=keep_vars).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{fqn} of the module is no tensor ({type(value).__name__}); "
                "keep extra state in a buffer."
            )
        tensors[f"{MODEL_PREFIX}{canonical_fqn(fqn)}"] = value
    return tensors


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """The name of each parameter."""
    return {parameter: canonical_fqn(fqn) for fqn, parameter in module.named_parameters()}


def optimized(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of everything the optimizer updates.

    Raises:
        CheckpointError: it updates a parameter that is not the module's.
    """
    names = parameter_names(module)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is "
                    "not in the module; create the optimizer after sharding the module."
                )
            yield names[parameter], parameter


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, owner and key of each buffer that a state dict lists. One may replace another."""
    for prefix, owner in module.named_modules():
        for key in owner._buffers.keys() - owner._non_persistent_buffers_set:
            fqn = f"{prefix}.{key}" if prefix else key
            yield f"{MODEL_PREFIX}{canonical_fqn(fqn)}", owner, key
