"""A run from its configuration to its exit status. Imports torch only once the plan stands."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

import hetero_fw
from hetero_fw.app.changes import tell_changes
from hetero_fw.app.entry import PRELOAD_VARIABLE
from hetero_fw.app.kept import tell_end, tell_what_is_kept, trained_step, what_is_left
from hetero_fw.app.left_places import check_left_places
from hetero_fw.app.planner import cluster_of, is_emulated, plan_for, workload_of
from hetero_fw.app.problem import report_config_error
from hetero_fw.app.released import warn_of_released
from hetero_fw.app.signals import by_name, ignore_for_now, ignore_others, save_signals, stop_signals
from hetero_fw.app.space import check_node_tier, check_space
from hetero_fw.app.storage_settings import (
    StoredRun,
    check_memory_storage,
    concealed,
    export_options,
    local_directory,
    node_directories,
    published_names,
    storage_location,
    storage_of,
)
from hetero_fw.app.usable import check_usable
from hetero_fw.app.validate import validate
from hetero_fw.data import check_paths
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import (
    EventLog,
    EventName,
    RunDirectory,
    Status,
    build_summary,
    create_run_directory,
    format_banner,
    write_json_atomically,
    write_report,
    write_status,
    write_summary,
    write_text_atomically,
)
from hetero_fw.planning import ParallelPlan, format_plan

if TYPE_CHECKING:
    from hetero_fw.recovery import AttemptSpec, RunOutcome

_EXIT_STATUS = {Status.DONE: 0, Status.PREEMPTED: 75, Status.FAILED: 1}
# What a launcher of another kind leaves in the environment would make ranks think that they are
# its ranks.
_FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def run(cfg: DictConfig) -> int:
    """Plan and, under `mode=train`, train. Returns the exit status of the design: 0, 1, 2 or 75."""
    try:
        return _run(cfg)
    except ConfigError as error:
        return report_config_error(error)


def _run(cfg: DictConfig) -> int:
    ConfigError.collect(validate(cfg))
    _check_data(cfg)
    if cfg.mode == "train":
        _check_devices(cfg)
    previous = _previous_run(cfg)
    host_flops_per_s = _host_flops(previous)
    workload = workload_of(cfg)
    plan = plan_for(cfg, workload, host_flops_per_s=host_flops_per_s)
    stored, warning = StoredRun(), ""
    if cfg.mode == "train" or cfg.ckpt.storage is None:  # a plan connects to nothing
        stored = _with_nodes(cfg, _look_at_storage(cfg, previous, plan))
        warning = check_left_places(cfg, previous, stored)
        _check_resume(cfg, previous, stored)
        released = warn_of_released(cfg, previous, stored)
        warning = "\n".join(filter(None, (warning, released)))
    check_usable(cfg, previous, stored)
    print(warning, end="\n" * bool(warning), flush=True)
    check_node_tier(cfg, plan)
    check_space(cfg, workload, previous)
    run_dir = create_run_directory(cfg.paths.root, cfg.run_name)
    with run_dir.lock():
        if cfg.mode == "train" and _is_done(cfg, run_dir):
            return 0
        print(format_banner(format_plan(plan), plan.to_dict()["emulation"]), flush=True)
        if cfg.mode == "plan" and run_dir.attempt_numbers():
            print(f"not written: {run_dir.path} keeps the plan that its run has trained with")
            return 0
        export_options(cfg)
        cfg = _with_run_path(cfg, run_dir, stored)
        _write_plan(run_dir, plan)
        if cfg.mode == "plan":
            print(f"plan written to {run_dir.plan_path}", flush=True)
            return 0
        return _train(cfg, run_dir, plan, stored)


def _check_data(cfg: DictConfig) -> None:
    """Look at the user's text files, where the data is text."""
    if "paths" in cfg.data:
        # Training and validation need one sample each, and a label for the last byte.
        check_paths(cfg.data.paths, min_bytes=2 * cfg.data.get("sequence_length", 1) + 1)


def _check_devices(cfg: DictConfig) -> None:
    cluster = cluster_of(cfg)
    if cluster.planning_only:
        raise ConfigError(
            f"hardware={cluster.name} is for planning only: {' '.join(cluster.notes)} "
            "Use mode=plan, or another hardware profile."
        )
    is_emulated(cfg, cluster)


def _previous_run(cfg: DictConfig) -> RunDirectory | None:
    """The run directory that `run_name` names, if it is there already."""
    if cfg.run_name is None:
        return None
    path = Path(cfg.paths.root).expanduser().absolute() / cfg.run_name
    return RunDirectory(path) if path.is_dir() else None


def _host_flops(previous: RunDirectory | None) -> float | None:
    """The rate an emulated run was paced for; it keeps that pace when it is continued."""
    if previous is None:
        return None
    try:
        emulation = json.loads(previous.plan_path.read_text())["emulation"]
        rate = float(emulation["host_flops_per_s"])
    except (OSError, ValueError, LookupError, TypeError):
        return None  # without emulation, or damaged: then it is measured as for a new run
    return rate if 0 < rate < math.inf else None


def _look_at_storage(
    cfg: DictConfig, previous: RunDirectory | None, plan: ParallelPlan
) -> StoredRun:
    """What is kept of this run so far; a storage that does not answer is told before the start."""
    if cfg.ckpt.storage is None:
        # Not by the code that knows remote storages: that takes torch, and this is at hand.
        names = published_names(previous.checkpoints_path if previous else None, cfg.ckpt.prefix)
        return StoredRun(checkpoints=names, num_attempts=_attempts_before(previous, names))
    if cfg.ckpt.storage.startswith("memory://"):
        check_memory_storage(cfg, plan.world_size)
    from hetero_fw.app.places import look_at, storage_root

    # A new run's name is not known yet; that the storage answers can be seen all the same.
    return look_at(storage_root(cfg, cfg.run_name or ".new"), cfg.ckpt.prefix)


def _attempts_before(previous: RunDirectory | None, checkpoints: Sequence[str]) -> int:
    """Attempts that checkpoints know of, where the run directory has no record of its own."""
    if previous is None or not checkpoints or previous.attempt_numbers():
        return 0
    from hetero_fw.checkpoint import num_attempts  # takes torch

    return num_attempts(previous.checkpoints_path)


def _with_nodes(cfg: DictConfig, stored: StoredRun) -> StoredRun:
    """Add what the node directories that this host sees hold; a run directory can be emptied."""
    root = local_directory(cfg, cfg.run_name) if cfg.run_name is not None else None
    nodes = node_directories(root) if root is not None else []
    if not nodes:
        return stored
    # Takes torch: only where an earlier run was interrupted.
    from hetero_fw.checkpoint import num_attempts

    names = {name for node in nodes for name in published_names(node, cfg.ckpt.prefix)}
    return StoredRun(
        checkpoints=tuple(sorted(names.union(stored.checkpoints))),
        num_attempts=max(stored.num_attempts, *map(num_attempts, nodes)),
    )


def _check_resume(cfg: DictConfig, previous: RunDirectory | None, stored: StoredRun) -> None:
    """Judge `resume` before anything is created."""
    where = str(previous.checkpoints_path) if previous else "that directory does not exist"
    if cfg.run_name is not None:
        where = storage_location(cfg, cfg.run_name) or where
    if cfg.resume == "must" and not stored.checkpoints:
        raise ConfigError(
            f"resume=must, but run_name={cfg.run_name} has no checkpoint to continue from "
            f"({where}). Use resume=auto to start fresh."
        )
    if cfg.resume == "never" and stored.checkpoints:
        local = local_directory(cfg, cfg.run_name)
        if local is not None:
            where = f"{where} with {local}" if previous is not None else str(local)
        raise ConfigError(
            f"resume=never, but {where} holds {len(stored.checkpoints)} checkpoints of an earlier "
            "run, which a fresh start would overwrite. Choose another run_name or resume=auto."
        )


def _with_run_path(cfg: DictConfig, run_dir: RunDirectory, stored: StoredRun) -> DictConfig:
    """Resolve the configuration for this run directory and store it there for the ranks."""
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    assert isinstance(resolved, DictConfig)
    OmegaConf.set_struct(resolved, False)
    resolved.run_name = run_dir.name
    resolved.paths.run_dir = str(run_dir.path)
    resolved.pop("hydra", None)
    hidden = concealed(resolved)
    OmegaConf.resolve(resolved)
    resolved.ckpt.storage = storage_of(resolved)
    resolved.ckpt.storage_options = hidden
    path = run_dir.hydra_path / "config.yaml"
    path.parent.mkdir(exist_ok=True)
    text = OmegaConf.to_yaml(resolved)
    tell_changes(path, text, has_trained=bool(stored.checkpoints))
    write_text_atomically(path, text)
    return resolved


def _write_plan(run_dir: RunDirectory, plan: ParallelPlan) -> None:
    write_json_atomically(run_dir.plan_path, plan.to_dict())
    write_text_atomically(run_dir.plan_text_path, format_plan(plan) + "\n")


def _is_done(cfg: DictConfig, run_dir: RunDirectory) -> bool:
    """Whether nothing is left to do; says so, and leaves the record of the run as it is."""
    step = trained_step(cfg, run_dir)
    if step is None:
        return False
    left = what_is_left(cfg, run_dir, step)
    if left:
        print(f"{run_dir.path} is DONE after step {step}, {left}")
        return False
    asked = f"trainer.max_steps={cfg.trainer.max_steps}"
    why = f"{asked} asks for no more"
    if step < cfg.trainer.max_steps:
        why = f"training ended itself before {asked}; a larger one goes on"
    print(
        f"{run_dir.path} is DONE after step {step}; {why}. Choose another run_name for another run."
    )
    return True


def _train(cfg: DictConfig, run_dir: RunDirectory, plan: ParallelPlan, stored: StoredRun) -> int:
    """Supervise attempts to the end of the run and leave its summary."""
    _prepare_environment()
    ignore_for_now(*save_signals(cfg))  # there is nothing to save yet
    # torch takes seconds to import; nothing before this point needs it.
    from hetero_fw.app.entry import run_rank
    from hetero_fw.recovery import RecoveryConfig, SaveRequest, StopRequest, Supervisor

    stop, save = StopRequest(), SaveRequest()
    stop.listen(signal.SIGINT, *by_name(stop_signals(cfg)))
    save.listen(*by_name(save_signals(cfg)))
    ignore_others(*stop_signals(cfg), *save_signals(cfg))
    _tell_start(cfg, run_dir, stored)
    supervisor = Supervisor(
        run_dir=run_dir,
        config=RecoveryConfig(**OmegaConf.to_container(cfg.recovery)),  # type: ignore[arg-type]
        entrypoint=run_rank,
        preload=_preload(cfg),
        stop=stop,
        save=save,
        announce=_announce,
        first_attempt=stored.num_attempts,
    )
    outcome = supervisor.run(_preparer(cfg, run_dir, plan, supervisor.store))
    if run_dir.path.is_dir():  # else that is told, and there is nowhere to write to
        _finish(cfg, run_dir, plan, outcome)
    return _EXIT_STATUS[outcome.status]


def _prepare_environment() -> None:
    """What every process of the run inherits."""
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    # One thread a process until a rank knows how many it may use; idle pools of many processes
    # cost more than they bring.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Killed processes leave semaphores that Python's resource tracker removes, with a warning.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    # The fork server looks modules up like this process does, from any working directory.
    package_root = str(Path(hetero_fw.__file__).resolve().parent.parent)
    paths = [package_root, *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _preload(cfg: DictConfig) -> list[str]:
    """Modules the fork server imports once: everything ranks need, the user's module included."""
    targets = [cfg.model.module._target_, cfg.data.train._target_]
    if cfg.optim.optimizer is not None:
        targets.append(cfg.optim.optimizer._target_)
    modules = dict.fromkeys(target.rpartition(".")[0] for target in targets)
    os.environ[PRELOAD_VARIABLE] = ",".join(modules)
    return ["hetero_fw.app.preload"]


def _tell_start(cfg: DictConfig, run_dir: RunDirectory, stored: StoredRun) -> None:
    newest = f"newest checkpoint {stored.checkpoints[-1]}" if stored.checkpoints else "fresh start"
    location = storage_location(cfg, run_dir.name)
    where = f", checkpoints in {location}" if location is not None else ""
    print(f"run directory {run_dir.path}{where} ({newest})", flush=True)


def _preparer(
    cfg: DictConfig, run_dir: RunDirectory, plan: ParallelPlan, store: Any
) -> Callable[[int], AttemptSpec]:
    """Writes what an attempt's ranks read and says which ranks each node has."""
    from hetero_fw.app.job import RankJob
    from hetero_fw.recovery import AttemptSpec, NodeRanks

    def prepare(attempt: int) -> AttemptSpec:
        path = run_dir.attempt_plan_path(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, plan.to_dict())
        with EventLog(run_dir.events_path, attempt) as events:
            events.write(
                EventName.PLAN,
                fingerprint=plan.fingerprint(),
                shares=list(plan.shares),
                step_s=plan.step_s,
            )
        job = RankJob(
            run_path=run_dir.path,
            attempt=attempt,
            store=store,
            num_threads=_num_threads(plan),
            stop_signals=stop_signals(cfg),
            save_signals=save_signals(cfg),
        )
        nodes = tuple(
            NodeRanks(
                node=node,
                first_rank=first,
                num_ranks=sum(rank.node == node for rank in plan.ranks),
            )
            for node, first in plan.first_ranks.items()
        )
        return AttemptSpec(attempt=attempt, nodes=nodes, argument=job.to_text())

    return prepare


def _num_threads(plan: ParallelPlan) -> int:
    """CPU threads for each rank: ranks that compute on the CPU share its cores."""
    num_cores = len(os.sched_getaffinity(0))
    return max(1, num_cores // plan.world_size)


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(
    cfg: DictConfig, run_dir: RunDirectory, plan: ParallelPlan, outcome: RunOutcome
) -> None:
    reason = tell_end(cfg, outcome)
    with EventLog(run_dir.events_path, outcome.attempt) as events:
        events.write(
            EventName.RUN_END,
            step=outcome.step,
            status=outcome.status.value,
            reason=reason,
            max_steps=cfg.trainer.max_steps,
        )
    result_path = run_dir.attempt_path(outcome.attempt) / "result.json"
    result = json.loads(result_path.read_text()) if result_path.is_file() else {}
    summary = build_summary(
        run_dir,
        plan_dict=plan.to_dict(),
        weights_digest=result.get("weights_digest"),
        status=outcome.status,
        reason=reason,
    )
    if outcome.status is Status.DONE:  # also where all of it was trained in another run directory
        summary["steps"] = outcome.step
    write_summary(run_dir, summary)
    # The status comes last: whoever waits for DONE finds everything in place.
    if cfg.monitor.report:
        write_report(run_dir)
    write_status(run_dir.status_path, outcome.status, outcome.step, outcome.attempt, reason)
    print(f"{outcome.status.value} after step {outcome.step}. {reason}".rstrip())
    told = tell_what_is_kept(cfg, run_dir, outcome)
    if told:
        print(told)
    print(f"summary {run_dir.summary_path}", flush=True)
