"""A composed configuration as plain containers, with every reference in it followed."""

from __future__ import annotations

from typing import Any, Final

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hetero_fw.app.problem import Problem

# Takes the place of a value that cannot be read; its problem is listed, checks pass over it.
UNREADABLE: Final = object()


def to_plain(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Resolve interpolations key by key.

    Returns:
        the containers, and one problem for each value that is missing or cannot be resolved.
    """
    problems: list[Problem] = []
    plain: dict[str, Any] = _read(config, "", problems)
    return plain, problems


def _read(node: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(node, DictConfig):
        keys: list[Any] = list(node)
        prefix = f"{path}." if path else ""
        return {str(key): _read_item(node, key, f"{prefix}{key}", problems) for key in keys}
    if isinstance(node, ListConfig):
        indices = range(len(node))
        return [_read_item(node, index, f"{path}[{index}]", problems) for index in indices]
    return node


def _read_item(node: DictConfig | ListConfig, key: Any, path: str, problems: list[Problem]) -> Any:
    if OmegaConf.is_missing(node, key):
        problems.append(Problem(path, f"missing. Give it a value with {path}=VALUE."))
        return UNREADABLE
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        unresolved: Any = OmegaConf.to_container(node, resolve=False)
        reason = str(error).strip().splitlines()[0].rstrip(".")
        rule = (
            f"cannot be resolved: {reason}. Choose options that fit together or set {path}=VALUE."
        )
        problems.append(Problem(path, rule, given=unresolved[key]))
        return UNREADABLE
    return _read(value, path, problems)
