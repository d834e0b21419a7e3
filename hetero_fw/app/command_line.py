"""The command line of train.py: everything that is wrong with it is told before Hydra runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from hetero_fw.app.compose import Composed, compose
from hetero_fw.app.groups import CONFIG_DIR, ConfigSource
from hetero_fw.app.storage_settings import conceal_file, storage_location
from hetero_fw.app.validate import require_valid
from hetero_fw.app.veil import veiled
from hetero_fw.errors import ConfigError


def check_command_line(arguments: Sequence[str]) -> list[str]:
    """Check the arguments of train.py and rewrite them for `hydra.main`.

    Flags go first, because Hydra loses overrides that follow a flag; keys that the schema knows
    but no file mentions get the `++` that Hydra asks for; a named sweep gets its directory; values
    of `ckpt.storage_options` become references, because Hydra shows and stores what it gets.
    Requests for help or information pass through unchecked.

    Raises:
        ConfigError: lists every problem found, in any run that the arguments describe.
    """
    flags = get_args_parser().parse_intermixed_args(list(arguments))
    given = _without(arguments, flags.overrides)
    if _is_question(flags):
        return [*given, *flags.overrides]
    composed = compose(flags.overrides, _source(flags), is_multirun=flags.multirun)
    # A configuration that is only shown may have wrong values: looking is how they are found.
    shown = () if flags.cfg else composed.value_problems
    ConfigError.collect(map(str, (*composed.composition_problems, *shown)))
    return [*given, *veiled(composed.overrides), *_sweep_directory(composed, flags.overrides)]


def job_config(config: DictConfig) -> DictConfig:
    """The configuration of the run that Hydra is starting, complete and valid.

    A run of a sweep lives in the directory that Hydra gave it, and keeps its checkpoints below the
    sweep's name if they are kept elsewhere: its own is only a number.

    Raises:
        ConfigError: lists every problem found.
    """
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.MULTIRUN:
        directory = Path(hydra.runtime.output_dir)
        config.paths.root, config.run_name = str(directory.parent), directory.name
        complete = require_valid(config)
        if complete.ckpt.storage is not None:
            complete.ckpt.storage = storage_location(complete, directory.parent.name)
        # Hydra writes what the sweep was started with.
        conceal_file(directory.parent / "multirun.yaml", complete)
        return complete
    return require_valid(config)


def worst_status(statuses: Sequence[int]) -> int:
    """The exit status of a sweep: failed, else badly configured, else preempted, else done."""
    return next((status for status in (1, 2, 75) if status in statuses), 0)


def _without(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The flags among the arguments: what is left when the overrides are taken out in order."""
    flags, pending = [], list(overrides)
    for argument in arguments:
        if pending and argument == pending[0]:
            pending.pop(0)
        else:
            flags.append(argument)
    return flags


def _is_question(flags: Any) -> bool:
    is_help = flags.help or flags.hydra_help or flags.shell_completion
    return bool(is_help or flags.info is not None or flags.experimental_rerun is not None)


def _source(flags: Any) -> ConfigSource:
    source = ConfigSource()
    path = flags.config_path or source.config_path
    if not path.startswith("pkg://"):
        # As Hydra does it: relative to the folder of train.py.
        path = str(CONFIG_DIR.parent / path)
    return ConfigSource(
        config_name=flags.config_name or source.config_name,
        config_path=path,
        config_dir=flags.config_dir,
    )


def _sweep_directory(composed: Composed, overrides: Sequence[str]) -> list[str]:
    """Overrides that place the runs of a named sweep, so that its name continues it."""
    run_name = composed.config.get("run_name")
    is_placed = any(text.lstrip("+").startswith("hydra.sweep.") for text in overrides)
    if not composed.is_multirun or run_name is None or is_placed:
        return []
    if any(text.lstrip("+").startswith("run_name=") and "," in text for text in overrides):
        return ["hydra.sweep.dir=${paths.root}", "hydra.sweep.subdir=${run_name}"]
    return ["hydra.sweep.dir=${paths.root}/${run_name}"]
