"""What an optimizer keeps, as tensors by name and JSON values, and back.

A tensor that it keeps for a parameter under a name is `optim.<fqn>.<key>`. The rest is in the
JSON values under the key `optimizer`: settings of the groups, values of parameters, what is of no
parameter, what its own `state_dict` adds. Tensors inside of those are kept by names as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hetero_fw.checkpoint.json_state import from_plain, is_dense, taken, to_plain
from hetero_fw.checkpoint.manifest import TensorEntry
from hetero_fw.errors import CheckpointError

OPTIMIZER_CLASS = "class"
_PREFIX = "optim."
_STANDARD = frozenset({"state", "param_groups"})


def optimizer_class(optimizer: Optimizer) -> str:
    """What tells whose state it is; without the module, which another release may move."""
    return type(optimizer).__qualname__


def flatten_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    on_lost: Callable[[str], None] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its live tensors by name, and the rest as JSON values.

    Args:
        names: of the parameters that it updates.
        on_lost: told what comes back as another type.

    Raises:
        CheckpointError: it keeps something that has no form in JSON; names it. Or its
            `state_dict` has raised.
    """
    writer = _Writer(on_lost)
    values = {
        fqn: writer.write(kept, fqn)
        for parameter, fqn in names.items()
        if (kept := writer.without_direct(fqn, optimizer.state.get(parameter, {})))
    }
    common = {key: value for key, value in optimizer.state.items() if key not in names}
    state = {
        OPTIMIZER_CLASS: optimizer_class(optimizer),
        "param_groups": [
            writer.write_group(group, names, f"param_groups.{number}")
            for number, group in enumerate(optimizer.param_groups)
        ],
        "values": values,
        # Only where there is any: few optimizers have it.
        **{
            key: writer.write(value, key)
            for key, value in (("common", common), ("added", _added(optimizer)))
            if value
        },
    }
    if writer.missing:
        raise CheckpointError(
            f"the state of {optimizer_class(optimizer)} holds what no checkpoint can keep: "
            f"{', '.join(writer.missing)}"
        )
    return writer.tensors, state


def create_tensors(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    entries: Mapping[str, TensorEntry],
    saved: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Tensors for everything that `entries` hold of the optimizer, by name.

    Loading covers every element; to set them before would touch all the memory once more.

    Args:
        names: of the parameters that it updates.
        entries: of the manifest.
        saved: the JSON values that `flatten_optimizer` has returned with the tensors.
    """
    places = _Places(optimizer, names)
    is_on_host = _in_containers(saved)
    return {
        name: places.unfilled(name, entry, is_on_host=is_on_host.get(name))
        for name, entry in entries.items()
        if name in is_on_host or places.owner(name) is not None
    }


def install_state(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any],
) -> None:
    """Make the optimizer's state what `flatten_optimizer` had found.

    Args:
        names: of the parameters that it updates.
        tensors: as from `create_tensors`, filled.
        saved: the JSON values.

    Raises:
        CheckpointError: its `load_state_dict` has raised.
    """
    _install(optimizer, names, tensors, saved)
    added = from_plain(saved.get("added", {}), tensors)
    if not added:
        return
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), **added})
    except Exception as error:
        raise CheckpointError(
            f"load_state_dict of {optimizer_class(optimizer)}: {type(error).__name__}: {error}"
        ) from error
    # torch's own casts what it is given to the dtypes of the parameters.
    _install(optimizer, names, tensors, saved)


def _install(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any],
) -> None:
    places = _Places(optimizer, names)
    inside = _in_containers(saved)
    states: dict[str, dict[Any, Any]] = {}
    for name, tensor in tensors.items():
        owner = places.owner(name)
        if owner is not None and name not in inside:
            states.setdefault(owner, {})[name.removeprefix(f"{_PREFIX}{owner}.")] = tensor
    for fqn, values in saved["values"].items():
        states.setdefault(fqn, {}).update(from_plain(values, tensors))
    optimizer.state.clear()
    for parameter, fqn in names.items():
        if fqn in states:
            optimizer.state[parameter] = {
                key: _laid_out(value, parameter) for key, value in states[fqn].items()
            }
    optimizer.state.update(from_plain(saved.get("common", {}), tensors))
    for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for key, value in settings.items():
            if key != "params":
                _restore_setting(group, key, from_plain(value))


def _in_containers(saved: Mapping[str, Any]) -> dict[str, bool]:
    """Names of the tensors that are parts of JSON values, and whether each was on the host."""
    return dict(taken([saved["values"], saved.get("common"), saved.get("added")]))


class _Writer:
    """Gathers the tensors of one optimizer, and what cannot be kept."""

    def __init__(self, on_lost: Callable[[str], None] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.missing: list[str] = []
        self._on_lost = on_lost

    def without_direct(self, fqn: str, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Take the tensors under names, which are most of it; returns the rest."""
        rest: dict[Any, Any] = {}
        for key, value in state.items():
            is_direct = isinstance(key, str) and isinstance(value, torch.Tensor)
            if is_direct and is_dense(value) and value.numel():
                self.tensors[f"{_PREFIX}{fqn}.{key}"] = value
            elif isinstance(value, torch.Tensor) and not value.numel():
                # There are no bytes of it to save, however it is laid out.
                rest[key] = torch.empty(value.shape, dtype=value.dtype)
            else:
                rest[key] = value
        return rest

    def write(self, value: Any, path: str) -> Any:
        return to_plain(value, self._on_lost, path, on_missing=self.missing.append, take=self._take)

    def write_group(
        self, group: Mapping[str, Any], names: Mapping[nn.Parameter, str], path: str
    ) -> dict[str, Any]:
        """Settings of a parameter group, with names for parameters."""
        return {
            key: [names[parameter] for parameter in value]
            if key == "params"
            else to_plain(
                _number(value), self._on_lost, f"{path}.{key}", on_missing=self.missing.append
            )
            for key, value in group.items()
        }

    def _take(self, value: torch.Tensor, path: str) -> str:
        name = f"{_PREFIX}{path}"
        while name in self.tensors:  # as of the keys 1 and "1"
            name += "'"
        self.tensors[name] = value
        return name


class _Places:
    """Where the optimizer's tensors belong."""

    def __init__(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self._parameters = {fqn: parameter for parameter, fqn in names.items()}
        self._on_device = {
            names[parameter]: bool(group.get("capturable") or group.get("fused"))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def owner(self, name: str) -> str | None:
        """The parameter that a tensor is kept for, by its name."""
        if not name.startswith(_PREFIX):
            return None
        return next(
            (fqn for fqn in _beginnings(name.removeprefix(_PREFIX)) if fqn in self._parameters),
            None,
        )

    def unfilled(self, name: str, entry: TensorEntry, *, is_on_host: bool | None) -> torch.Tensor:
        """A tensor for `entry`.

        Args:
            is_on_host: None if that was not said.
        """
        owner = self.owner(name)
        if owner is None:
            devices = {parameter.device for parameter in self._parameters.values()}
            device = torch.device("cpu") if is_on_host or not devices else devices.pop()
            return torch.empty(entry.size, dtype=entry.torch_dtype, device=device)
        parameter = self._parameters[owner]
        # A step count has the shape of a scalar parameter but is not laid out like one.
        is_step = name == f"{_PREFIX}{owner}.step"
        if not is_step and entry.size == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=entry.torch_dtype, requires_grad=False)
        # Optimizers keep counters on the host unless their kernels read them on the device.
        if is_on_host is None:
            is_on_host = not self._on_device[owner] and math.prod(entry.size) == 1
        device = torch.device("cpu") if is_on_host else parameter.device
        return torch.empty(entry.size, dtype=entry.torch_dtype, device=device)


def _beginnings(name: str) -> Iterator[str]:
    """What of a dotted name may be that of a parameter; of those no two are parameters."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _laid_out(value: Any, parameter: nn.Parameter) -> Any:
    """An empty tensor like its parameter, which JSON could not tell; anything else as it is."""
    is_empty = isinstance(value, torch.Tensor) and not value.numel()
    if is_empty and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return value


def _added(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer adds to a state dict itself."""
    is_own = getattr(optimizer.state_dict, "__func__", None) is not Optimizer.state_dict
    if not is_own and not optimizer._optimizer_state_dict_post_hooks:
        return {}
    try:
        state = optimizer.state_dict()
    except Exception as error:
        raise CheckpointError(
            f"state_dict of {optimizer_class(optimizer)}: {type(error).__name__}: {error}"
        ) from error
    return {key: value for key, value in state.items() if key not in _STANDARD}


def _number(value: Any) -> Any:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_scalar else value


def _restore_setting(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.copy_(torch.as_tensor(value, dtype=current.dtype))
    else:
        # An older release wrote tuples as lists.
        group[key] = tuple(value) if isinstance(current, tuple) else value
