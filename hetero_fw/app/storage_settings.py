"""What the configuration says about where checkpoints are kept, and how the login stays unseen.

The run's stored configuration holds a mask in place of each value of `ckpt.storage_options`, unless
that is a bare reference to an environment variable. The ranks get the real values through the
environment, as clients of object stores take their logins anyway: unlike a file, it is not left
behind by a process that is killed, needs no directory that only its owner can read on every node,
and can be read by the same user alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import MASK, RunDirectory, without_secrets

OPTIONS_VARIABLE = "HETERO_STORAGE_OPTIONS"
# Variables that only the process of the command line has.
_STEP = re.compile(r"-step-(\d+)(?:\.\d+-\w+)?$")
VEIL_PREFIX = f"{OPTIONS_VARIABLE}_"
_REFERENCE = re.compile(rf"\$\{{oc\.env:(?!{VEIL_PREFIX})[A-Za-z_]\w*\}}")


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a run has left where it keeps its checkpoints.

    Attributes:
        checkpoints: names of their directories, oldest first; none of them was read.
        num_attempts: one more than the number of the newest attempt that the storage knows of.
    """

    checkpoints: tuple[str, ...] = ()
    num_attempts: int = 0


def stored_configuration(run_dir: RunDirectory) -> DictConfig | None:
    """What a run was started with last, which says where its checkpoints are.

    Returns:
        None if it has stored none.

    Raises:
        ConfigError: it has, but that cannot be read or does not say it; names the file.
    """
    path = run_dir.hydra_path / "config.yaml"
    try:
        cfg = OmegaConf.load(path)
        problem = _unfit(cfg)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = str(error).splitlines()[0]
    if problem:
        raise ConfigError(f"{path} cannot be used ({problem})")
    assert isinstance(cfg, DictConfig)
    return cfg


def _unfit(cfg: Any) -> str:
    """Why a stored configuration does not say where checkpoints are; "" if it does."""
    ckpt = cfg.get("ckpt") if isinstance(cfg, DictConfig) else None
    if not isinstance(ckpt, DictConfig):
        return "it has no section ckpt"
    # Options of the storage stay as they are; what they name may be gone without harm.
    values = {key: ckpt.get(key) for key in map(str, ckpt) if key != "storage_options"}
    tiers = values.get("tiers")
    if tiers is not None and not isinstance(tiers, DictConfig):
        return "ckpt.tiers is no section"
    local = tiers.get("local") if tiers is not None else None
    if not isinstance(values.get("prefix", ""), str | int):
        return "ckpt.prefix is no text"
    texts = {"ckpt.storage": values.get("storage"), "ckpt.tiers.local": local}
    odd = [key for key, value in texts.items() if not isinstance(value, str | None)]
    return f"{odd[0]} is no text" if odd else ""


def storage_of(cfg: DictConfig) -> str | None:
    """`ckpt.storage`; a path that is not a URL from the root of the file system."""
    storage = cfg.ckpt.get("storage")
    if storage is None or "://" in storage:
        return storage if storage is None else str(storage)
    return str(Path(storage).expanduser().absolute())


def storage_location(cfg: DictConfig, run_name: str) -> str | None:
    """URL or path of the checkpoints of one run; None if they are kept in its run directory."""
    storage = storage_of(cfg)
    return None if storage is None else f"{storage.rstrip('/')}/{run_name}"


def check_memory_storage(cfg: DictConfig, world_size: int) -> None:
    """Each process has a memory of its own: what another one saves there is never seen.

    Raises:
        ConfigError: more than one process of the run would save there.
    """
    told = f"ckpt.storage={cfg.ckpt.storage}: each process has a memory of its own, and"
    if world_size > 1:
        raise ConfigError(f"{told} this run has {world_size} ranks. Use a path or another URL.")
    if cfg.ckpt.async_mode == "async_with_pinned_mem":
        raise ConfigError(
            f"{told} ckpt.async_mode=async_with_pinned_mem writes in another one. Use "
            "ckpt.async_mode=async, or a path."
        )


def local_directory(cfg: DictConfig, run_name: str) -> Path | None:
    """Directory of the node directories of one run, on every node; None if it has none."""
    local = (cfg.ckpt.get("tiers") or {}).get("local")
    return None if local is None else Path(local).expanduser().absolute() / run_name


def node_directories(local: Path) -> list[Path]:
    """Those in the directory of `local_directory` that this host sees."""
    return [path for path in local.iterdir() if path.is_dir()] if local.is_dir() else []


def published_names(root: Path | None, prefix: str) -> tuple[str, ...]:
    """Names of published checkpoints in a local directory, oldest first; none is read."""
    if root is None or not root.is_dir():
        return ()
    return tuple(sorted(path.parent.name for path in root.glob(f"{prefix}-step-*/manifest.json")))


def newest_step(names: Iterable[str]) -> int:
    """The largest step in names of checkpoints; 0 if there is none."""
    return max(steps_of(names), default=0)


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps in names of checkpoints, each once, smallest first."""
    found = (_STEP.search(name) for name in names)
    return sorted({int(match[1]) for match in found if match is not None})


def storage_options(cfg: DictConfig) -> dict[str, Any]:
    """The real options, also from a stored configuration.

    Raises:
        ConfigError: the configuration does not hold them and the environment does not either.
    """
    node = cfg.ckpt.get("storage_options") or {}
    if MASK in _leaves(_plain(node, resolve=False)):
        return _from_environment(cfg)
    try:
        return _plain(node, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"ckpt.storage_options cannot be resolved: {reason}.") from None


def options_for_url() -> dict[str, Any]:
    """What the environment says about a storage that is named without a configuration.

    Raises:
        ConfigError: the variable does not hold a JSON object.
    """
    text = os.environ.get(OPTIONS_VARIABLE, "{}")
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f'{OPTIONS_VARIABLE} is not a JSON object such as {{"key": "..."}}.')
    return options


def export_options(cfg: DictConfig) -> None:
    """Hand the real options to the processes that this one starts from now on."""
    os.environ.pop(OPTIONS_VARIABLE, None)
    options = storage_options(cfg)
    if options:
        os.environ[OPTIONS_VARIABLE] = json.dumps(options)


def concealed(cfg: DictConfig) -> dict[str, Any]:
    """The options as they may be stored."""
    hidden: dict[str, Any] = _conceal(_plain(cfg.ckpt.get("storage_options") or {}, resolve=False))
    return hidden


def conceal_file(path: Path, cfg: DictConfig) -> None:
    """Mask the values of the options in a file that was written without regard to them."""
    options = storage_options(cfg)
    if options and path.is_file():
        path.write_text(without_secrets(path.read_text(), options))


def _plain(node: Any, *, resolve: bool) -> dict[str, Any]:
    if not isinstance(node, DictConfig):
        return dict(node)
    container: Any = OmegaConf.to_container(node, resolve=resolve)
    return dict(container)


def _from_environment(cfg: DictConfig) -> dict[str, Any]:
    if OPTIONS_VARIABLE not in os.environ:
        raise ConfigError(
            f"ckpt.storage_options of {cfg.get('run_name')} are not stored with it. Give them as "
            f"JSON in the environment variable {OPTIONS_VARIABLE}, or let the configuration name "
            "them as ${oc.env:NAME}."
        )
    return options_for_url()


def _conceal(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _conceal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_conceal(item) for item in value]
    is_reference = isinstance(value, str) and _REFERENCE.fullmatch(value)
    return value if is_reference else MASK


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
