"""Config groups and their options, as Hydra finds them on the search path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig

from hetero_fw.app.problem import Problem
from hetero_fw.app.schema import Config, keys_of
from hetero_fw.errors import ConfigError, closest, did_you_mean

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"
HYDRA_VERSION_BASE = "1.3"

# Groups whose options change the others.
GLOBAL_GROUPS = ("experiment", "debug")


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """Where configuration files are looked for.

    Attributes:
        config_name: the file that composition starts from.
        config_path: folder of that file, by default the `conf` folder of the repository.
        config_dir: a folder with further options, such as `<config_dir>/hardware/lab.yaml`.
    """

    config_name: str = "train"
    config_path: str = str(CONFIG_DIR)
    config_dir: str | None = None


class ConfigLibrary:
    """The configuration files that one command line can reach.

    Hydra's loader is used below its `compose` function: that one stops at the first problem and
    keeps process-wide state that `hydra.main` then refuses to find.
    """

    def __init__(self, source: ConfigSource, overrides: Sequence[str] = ()) -> None:
        """Collect the sources; of the overrides only `hydra.searchpath=` adds any.

        Raises:
            ConfigError: a folder does not exist.
        """
        ConfigError.collect(_missing_folders(source))
        version.setbase(HYDRA_VERSION_BASE)
        setup_globals()
        path = create_config_search_path(source.config_path)
        if source.config_dir is not None:
            path.prepend(
                provider="command-line",
                path=f"file://{Path(source.config_dir).resolve()}",
                anchor=SearchPathQuery(provider="schema"),
            )
        self.loader = ConfigLoaderImpl(path)
        self._name = source.config_name
        self._searchpath = [text for text in overrides if "hydra.searchpath=" in text]
        self._options: dict[tuple[str, ObjectType], list[str]] = {}

    def compose(self, overrides: Sequence[str], *, is_multirun: bool = False) -> DictConfig:
        """Compose the chosen options; the result includes the `hydra` section."""
        mode = RunMode.MULTIRUN if is_multirun else RunMode.RUN
        return self.loader.load_configuration(self._name, list(overrides), mode)

    @property
    def groups(self) -> list[str]:
        """Names of the groups, Hydra's own left out."""
        return [name for name in self._list("", ObjectType.GROUP) if name != "hydra"]

    def options(self, group: str) -> list[str]:
        """Options of a group; empty if there is no such group."""
        return self._list(group, ObjectType.CONFIG)

    def _list(self, group: str, kind: ObjectType) -> list[str]:
        found = self._options.get((group, kind))
        if found is None:
            found = self.loader.get_group_options(group, kind, self._name, self._searchpath)
            self._options[group, kind] = found
        return found

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses options of a group rather than setting a value."""
        is_section = isinstance(override.value(), dict)
        return not is_section and bool(self.options(override.key_or_group))

    def check_choice(self, override: Override) -> Iterator[Problem]:
        """Yield what is wrong with an override that chooses options of a group."""
        group, value = override.key_or_group, override.value()
        options = self.options(group)
        if override.is_add() and (group in keys_of(Config) or group in GLOBAL_GROUPS):
            rule = f"an option of {group} is always chosen. Drop the +: {group}={value}."
            yield Problem(f"+{group}", rule, given=value)
        if override.is_delete():
            return
        for choice in value if isinstance(value, list) else [value]:
            if choice not in options:
                near = did_you_mean(str(choice), options)
                rule = f"unknown option.{near} Options of {group}: {', '.join(options)}."
                yield Problem(group, rule, given="null" if choice is None else choice)

    def nearest_choice(self, override: Override) -> str | None:
        """The override that a misspelt choice of an option was probably meant to be."""
        option = closest(str(override.value()), self.options(override.key_or_group))
        return f"{override.key_or_group}={option}" if option is not None else None


def _missing_folders(source: ConfigSource) -> Iterator[str]:
    if not Path(source.config_path).is_dir() and not source.config_path.startswith("pkg://"):
        yield (
            f"--config-path={source.config_path}: there is no such folder. Run from a checkout, "
            "which has a conf folder, or name another one."
        )
    if source.config_dir is not None and not Path(source.config_dir).is_dir():
        yield f"--config-dir={source.config_dir}: there is no such folder."
