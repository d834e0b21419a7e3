"""Rules that span several keys. Each yields complete problems; all of them are asked every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsspec.registry import known_implementations

from hetero_fw.app.problem import Problem
from hetero_fw.app.targets import accepted_arguments
from hetero_fw.errors import did_you_mean

Values = Mapping[str, Any]
_MAX_NAME_BYTES = 200
_AVERAGING = re.compile(
    r"lightning\.pytorch\.callbacks\.(weight_averaging\.)?(EMA)?WeightAveraging"
)
AVERAGES_WEIGHTS = (
    "puts averages in the place of a checkpoint's weights, which has those that are trained. Keep "
    "averages in the module, or train without checkpoints (ckpt=none)."
)


def check_rules(values: Values, known: Collection[Problem] = ()) -> Iterator[Problem]:
    """Yield the problems of values that are right one by one but not together.

    Args:
        values: the complete configuration in plain containers.
        known: problems found already; a rule that reads one of their keys is not asked.
    """
    for reads, rule in _RULES:
        if not any(problem.touches(key) for key in reads for problem in known):
            yield from rule(values)


def _run_name(values: Values) -> Iterator[Problem]:
    name = values["run_name"]
    if name is None:
        return
    has_separator = re.search(r"[/\\\x00-\x1f]", name) is not None
    is_reserved = not name.strip() or name in {".", ".."}
    if has_separator or is_reserved or len(name.encode()) > _MAX_NAME_BYTES:
        yield Problem(
            "run_name",
            f"must be the name of one directory, without separators, of at most {_MAX_NAME_BYTES} "
            "bytes. paths.root=DIRECTORY says where it is created.",
            given=name,
        )


def _resume(values: Values) -> Iterator[Problem]:
    if values["resume"] == "must" and values["run_name"] is None:
        yield Problem(
            "resume",
            "needs the name of the run to continue. Add run_name=NAME, or let resume=auto start a "
            "new run.",
            given="must",
        )


def _run_dir(values: Values) -> Iterator[Problem]:
    run_dir = values["paths"]["run_dir"]
    if run_dir is not None:
        yield Problem(
            "paths.run_dir",
            "is filled in by the run. Choose the directory with paths.root=DIRECTORY and "
            "run_name=NAME.",
            given=run_dir,
        )


def _groups(values: Values) -> Iterator[Problem]:
    hardware = values["hardware"]
    if hardware["probe"] and hardware["groups"]:
        yield Problem(
            "hardware.probe",
            "finds the devices of this machine, but hardware.groups declares "
            f"{', '.join(hardware['groups'])} too. Set hardware.probe=false to use the groups.",
            given="true",
        )
    if not hardware["probe"] and not hardware["groups"]:
        yield Problem(
            "hardware.groups",
            "is empty. Declare devices with +hardware.groups.NAME.device=DEVICE, or set "
            "hardware.probe=true.",
        )


def _planning_only(values: Values) -> Iterator[Problem]:
    hardware = values["hardware"]
    if hardware["planning_only"] and values["mode"] == "train":
        yield Problem(
            "hardware.planning_only",
            f"{hardware['name']} can be planned for but not trained on. Add mode=plan, or run "
            f"`hetero plan hardware={hardware['name']}`.",
            given="true",
        )


def _batch_split(values: Values) -> Iterator[Problem]:
    parallel, batch = values["parallel"], values["data"]["global_batch_size"]
    split = parallel["batch_split"]
    if not isinstance(split, list):
        return
    given = str(split).replace(" ", "")
    if sum(split) != batch:
        rule = f"adds up to {sum(split)} samples, must add up to data.global_batch_size={batch}."
        yield Problem("parallel.batch_split", rule, given=given)
    if parallel["kind"] == "single" and len(split) != 1:
        rule = (
            f"divides the batch among {len(split)} ranks, but parallel.kind=single has one. "
            "Drop one of the two."
        )
        yield Problem("parallel.batch_split", rule, given=given)


def _heartbeat(values: Values) -> Iterator[Problem]:
    recovery = values["recovery"]
    silence_s = recovery["heartbeat_interval_s"] * recovery["heartbeat_max_missed"]
    if recovery["process_group_timeout_s"] <= silence_s:
        yield Problem(
            "recovery.process_group_timeout_s",
            "must be longer than heartbeat_interval_s x heartbeat_max_missed = "
            f"{silence_s:g} s, so that heartbeats find a hung rank first.",
            given=recovery["process_group_timeout_s"],
        )


def _optimizer(values: Values) -> Iterator[Problem]:
    optim = values["optim"]
    for name in ("scheduler", "base_batch_size"):
        if optim["optimizer"] is None and optim[name] is not None:
            yield Problem(
                f"optim.{name}",
                "has no effect without optim.optimizer: the module then configures its own. "
                "Choose optim=adamw or optim=sgd.",
            )
    for name in ("optimizer", "scheduler"):
        if optim[name] is not None and optim[name].get("_partial_") is not True:
            rule = "needs _partial_: true, because its first argument comes from the run."
            yield Problem(f"optim.{name}", rule)


def _validation(values: Values) -> Iterator[Problem]:
    steps = values["trainer"]["val_interval_steps"]
    if steps is not None and values["data"]["val"] is None:
        yield Problem(
            "trainer.val_interval_steps",
            "there is nothing to validate on, data.val is null. Give data.val a dataset, or set "
            "trainer.val_interval_steps=null.",
            given=steps,
        )


def _prefix(values: Values) -> Iterator[Problem]:
    prefix = values["ckpt"]["prefix"]
    if not re.fullmatch(r"\w[\w.-]{0,99}", prefix):
        rule = "starts the names of directories; use letters, digits and . _ - only."
        yield Problem("ckpt.prefix", rule, given=prefix)


def _storage(values: Values) -> Iterator[Problem]:
    storage = values["ckpt"]["storage"]
    if storage is None:
        return
    scheme, separator, rest = storage.partition("://")
    if separator and re.search(r":[^/]*@", rest):
        rule = (
            "holds a password, and is shown where a run keeps its checkpoints. Put it into "
            "ckpt.storage_options, best as ${oc.env:NAME}."
        )
        yield Problem("ckpt.storage", rule)
    elif not storage.strip() or (separator and not rest.strip("/")):
        rule = (
            "names no place. Give a path, or a URL such as s3://bucket/folder, or null for the "
            "run directory."
        )
        yield Problem("ckpt.storage", rule, given=repr(storage) if not storage.strip() else storage)
    elif re.match(r"\w+:/(?!/)", storage):
        scheme, _, path = storage.partition(":/")
        url = f"{scheme}://{'/' * (scheme == 'file')}{path}"
        rule = f"is a URL with one slash. Give {url}, or ./{storage} for a path."
        yield Problem("ckpt.storage", rule, given=storage)
    elif "::" in storage:
        rule = "is a chain of storages; checkpoints go to one directly, without a cache between."
        yield Problem("ckpt.storage", rule, given=storage)
    elif scheme in ("http", "https"):
        rule = "can be read but not written to. Give a path, or a URL such as s3://bucket/folder."
        yield Problem("ckpt.storage", rule, given=storage)
    elif separator and scheme not in known_implementations:
        rule = (
            f"{scheme}:// is no storage that fsspec knows."
            f"{did_you_mean(scheme, known_implementations)} Give a path, or a URL such as "
            "s3://bucket/folder, gs://bucket/folder or hdfs://host/folder."
        )
        yield Problem("ckpt.storage", rule, given=storage)


def _storage_options(values: Values) -> Iterator[Problem]:
    ckpt = values["ckpt"]
    if ckpt["storage_options"] and "://" not in (ckpt["storage"] or ""):
        rule = "have no effect without a URL in ckpt.storage."
        yield Problem("ckpt.storage_options", rule)


def _tiers(values: Values) -> Iterator[Problem]:
    tiers = values["ckpt"]["tiers"]
    local = tiers["local"]
    if local is None:
        if tiers["storage_interval_steps"] is not None:
            rule = "has no effect without ckpt.tiers.local; ckpt.interval_steps is for all saves."
            yield Problem(
                "ckpt.tiers.storage_interval_steps", rule, given=tiers["storage_interval_steps"]
            )
        return
    rest = "such as /dev/shm/hetero_fw or a path on each node's own disk, or null for none."
    if "://" in local:
        rule = f"is a URL; every node has this directory for itself. Give a path {rest}"
        yield Problem("ckpt.tiers.local", f"{rule} URLs are for ckpt.storage.", given=local)
    elif not Path(local).is_absolute() and not local.startswith("~"):
        rule = f"must be an absolute path, the same on every node, {rest}"
        yield Problem("ckpt.tiers.local", rule, given=local or "''")


def _prior_groups(values: Values) -> Iterator[Problem]:
    prior_s, groups = values["ckpt"]["prior_mtbf_s"], values["hardware"]["groups"]
    # Without declared groups, those of this machine are found when the run starts.
    if isinstance(prior_s, Mapping) and groups:
        for name in prior_s.keys() - groups.keys():
            yield Problem(
                f"ckpt.prior_mtbf_s.{name}",
                f"is not a hardware group.{did_you_mean(name, groups)} Groups: "
                f"{', '.join(groups)}.",
            )


def _init_from(values: Values) -> Iterator[Problem]:
    path = values["model"]["init_from"]
    if path is not None and not Path(path).expanduser().is_file():
        rule = "there is no such file. Give a safetensors file or a state_dict by torch.save."
        yield Problem("model.init_from", rule, given=path)


def _limits(values: Values) -> Iterator[Problem]:
    for name, limit in (values["callbacks"]["emergency_save"] or {}).items():
        if not isinstance(limit, Mapping) or limit.get("rearm_below") is None:
            continue
        if limit["rearm_below"] > limit["above"]:
            yield Problem(
                f"callbacks.emergency_save.{name}.rearm_below",
                f"must not be higher than above={limit['above']:g}; null means just that.",
                given=limit["rearm_below"],
            )


def _source(values: Values) -> Iterator[Problem]:
    source = (values["callbacks"]["emergency_save"] or {}).get("source")
    if source is None:
        return
    accepted = accepted_arguments(source["_target_"])
    if accepted is not None and not {"rank", "device"} <= set(accepted):
        yield Problem(
            "callbacks.emergency_save.source",
            f"must take the arguments rank and device; {source['_target_']} takes: "
            f"{', '.join(accepted) or 'none'}.",
        )


def _save_signals(values: Values) -> Iterator[Problem]:
    signals = (values["callbacks"]["emergency_save"] or {}).get("save_signals")
    if signals and values["ckpt"]["policy"] == "none":
        yield Problem(
            "callbacks.emergency_save.save_signals",
            "have no effect with ckpt=none, which saves nothing. Choose ckpt=adaptive or "
            "ckpt=fixed.",
            given=str(signals).replace("'", "").replace(" ", ""),
        )


def _averaging(values: Values) -> Iterator[Problem]:
    """The classes themselves; a class that derives from them is found when it is made."""
    if values["ckpt"]["policy"] == "none":
        return
    for name, node in values["callbacks"].items():
        target = node.get("_target_") if isinstance(node, Mapping) else None
        if isinstance(target, str) and _AVERAGING.fullmatch(target):
            yield Problem(f"callbacks.{name}", AVERAGES_WEIGHTS, given=target)


# The keys that a rule reads, and the rule.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Values], Iterator[Problem]]], ...] = (
    (("run_name",), _run_name),
    (("resume", "run_name"), _resume),
    (("paths",), _run_dir),
    (("hardware.probe", "hardware.groups"), _groups),
    (("hardware.name", "hardware.planning_only", "mode"), _planning_only),
    (("parallel", "data.global_batch_size"), _batch_split),
    (("recovery",), _heartbeat),
    (("optim",), _optimizer),
    (("trainer.val_interval_steps", "data.val"), _validation),
    (("ckpt.prefix",), _prefix),
    (("ckpt.storage",), _storage),
    (("ckpt.storage", "ckpt.storage_options"), _storage_options),
    (("ckpt.tiers",), _tiers),
    (("ckpt.prior_mtbf_s", "hardware.groups"), _prior_groups),
    (("model.init_from",), _init_from),
    (("callbacks.emergency_save",), _limits),
    (("callbacks.emergency_save",), _source),
    (("callbacks.emergency_save", "ckpt.policy"), _save_signals),
    (("callbacks", "ckpt.policy"), _averaging),
)
