"""The tensors of a module and its optimizer as they are, under names that no plan changes.

Names address the state, not ranks or positions: `model.<fqn>` and `optim.<fqn>.<key>`, where
`<fqn>` is the parameter's name. See `optimizer_state` for the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hetero_fw.checkpoint.adoption import BUFFERS, record_of
from hetero_fw.checkpoint.module_state import ModuleState, canonical_fqn
from hetero_fw.checkpoint.optimizer_state import flatten_optimizer
from hetero_fw.errors import CheckpointError

OPTIMIZER_STATE = "optimizer"


class LiveState:
    """A training's tensors by name, looked up once and read as often as one likes.

    The module is asked for its parameters when this is made, between two steps: while a step
    computes, FSDP has other tensors in their places. All else is read each time.

    Args:
        module: sharded already, if it is going to be.
        optimizer: None: weights and buffers only.

    Raises:
        CheckpointError: the module keeps state that is no tensor, or the optimizer has a parameter
            that is not the module's.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._state = ModuleState(module)
        self._weights = {name: p.detach() for name, p in self._state.parameters.items()}
        self._optimizer = optimizer
        self._optimized = tuple(optimized(module, optimizer)) if optimizer is not None else ()
        self._names = {parameter: fqn for fqn, parameter in self._optimized}
        self._parameters = tuple(module.parameters())

    @property
    def changing(self) -> frozenset[str]:
        """Names of what may change before the optimizer's next step, and of what it never does."""
        optimized = {id(parameter) for _, parameter in self._optimized}
        return self.buffers | {
            name
            for name, parameter in self._state.parameters.items()
            if id(parameter) not in optimized
        }

    @property
    def buffers(self) -> frozenset[str]:
        """Names of what a forward pass may change; some of it holds infinities by design."""
        return frozenset(self._state.buffers() | self._state.added())

    def flatten(
        self,
        *,
        with_optimizer: bool = True,
        buffers: Mapping[str, torch.Tensor] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name, and the rest as JSON values under the keys `buffers` and `optimizer`.

        The tensors are the live ones (nothing is copied): parameters, persistent buffers and the
        optimizer's state, DTensors where the module is sharded; but what the module adds to its
        `state_dict` itself is a copy. Pass the second value on as part of a checkpoint's `state`,
        at its top level.

        Args:
            with_optimizer: its state too, which has no key there otherwise.
            buffers: as `copy_buffers` has returned them. None: as they are now, between two steps.
            on_lost: told what of the optimizer's state comes back as another type.

        Raises:
            CheckpointError: the optimizer keeps something that no checkpoint can hold.
        """
        buffers = self._state.buffers() | self._state.added() if buffers is None else buffers
        tensors = self._weights | dict(buffers)
        state: dict[str, Any] = {BUFFERS: record_of(self._state.without_added(buffers))}
        if self._optimizer is None or not with_optimizer:
            return tensors, state
        kept, state[OPTIMIZER_STATE] = flatten_optimizer(self._optimizer, self._names, on_lost)
        return tensors | kept, state

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
        """What a forward pass may change, as it is now, between two steps."""
        with torch.no_grad():
            copies = {
                name: buffer.detach().clone() for name, buffer in self._state.buffers().items()
            }
        return copies | self._state.added()


def flatten_training_state(
    module: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """As `LiveState.flatten`, once.

    Raises:
        CheckpointError: as `LiveState` and its `flatten`.
    """
    return LiveState(module, optimizer).flatten()


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
