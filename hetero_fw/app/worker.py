"""One rank of one attempt: from the files of the run to its last step."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app.context import RankContext
from hetero_fw.app.job import RankJob
from hetero_fw.app.signals import by_name
from hetero_fw.app.training import train
from hetero_fw.errors import HeteroError
from hetero_fw.hardware import DEVICES, DeviceKind
from hetero_fw.monitoring import EventLog, EventName, RunDirectory, label_log_lines
from hetero_fw.parallel import (
    Exchange,
    choose_backend,
    connect_ranks,
    disconnect_ranks,
)
from hetero_fw.planning import ParallelPlan
from hetero_fw.profiling import limit_memory
from hetero_fw.recovery import (
    AttemptFiles,
    Heartbeat,
    RankEnd,
    SaveRequest,
    StopRequest,
    die_with_parent,
    share_fork_server,
    write_failure,
)


def run_rank(argument: str) -> None:
    """Entry point of every rank; `argument` is `<first rank of the node>:<RankJob>`.

    Leaves a report and exit status 1 on any exception: waiting for peers here would hide the
    error behind their timeout (https://github.com/Lightning-AI/pytorch-lightning/issues/20187).
    """
    die_with_parent()
    # Loader workers come from the run's fork server too, instead of one more server a rank.
    share_fork_server()
    first_rank, _, text = argument.partition(":")
    rank = int(first_rank) + int(os.environ["LOCAL_RANK"])
    job = RankJob.from_text(text)
    run_dir = RunDirectory(job.run_path)
    files = AttemptFiles(run_dir.attempt_path(job.attempt) / "ranks")
    stop, save = StopRequest(), SaveRequest()
    stop.listen(*by_name(job.stop_signals))
    save.listen(*by_name(job.save_signals))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files.announce(rank)
    plan = ParallelPlan.from_dict(json.loads(run_dir.attempt_plan_path(job.attempt).read_text()))
    try:
        files.finish(rank, _run(job, run_dir, files, plan, rank, stop, save))
    except BaseException as error:  # noqa: BLE001  # the process boundary: reported and fatal
        now_s = time.time()
        node = plan.ranks[rank].node
        try:
            write_failure(files.folder, error, rank=rank, node=node, time_s=now_s)
            sys.stdout.flush()
        finally:
            os._exit(1)


def _run(
    job: RankJob,
    run_dir: RunDirectory,
    files: AttemptFiles,
    plan: ParallelPlan,
    rank: int,
    stop: StopRequest,
    save: SaveRequest,
) -> RankEnd:
    cfg = OmegaConf.load(run_dir.hydra_path / "config.yaml")
    assert isinstance(cfg, DictConfig)
    heartbeat = Heartbeat(files.heartbeat_path(rank), cfg.recovery.heartbeat_interval_s)
    heartbeat.start()
    _quieten()
    label_log_lines(f"rank {rank}")
    torch.set_num_threads(job.num_threads)
    device = _device_of(plan, rank)
    with EventLog(run_dir.events_path, job.attempt, rank) as events:
        events.write(
            EventName.ATTEMPT_START,
            pid=os.getpid(),
            node=plan.ranks[rank].node,
            device=plan.ranks[rank].device,
            group=plan.ranks[rank].group,
            runs_on=str(device),
            is_emulated=plan.emulation is not None,
        )
        store = job.store.connect(job.attempt, cfg.recovery.start_timeout_s)
        group = _connect(plan, rank, store, cfg.recovery.process_group_timeout_s)
        exchange = Exchange(group)
        _compare_plans(plan, exchange)
        if plan.emulation is not None:
            limit_memory(plan.ranks[rank].budget_bytes)
        end = train(
            RankContext(
                cfg=cfg,
                plan=plan,
                rank=rank,
                device=device,
                run_dir=run_dir,
                attempt=job.attempt,
                exchange=exchange,
                group=group,
                store=store,
                stop=stop,
                save=save,
                events=events,
            )
        )
    disconnect_ranks()
    heartbeat.stop()
    return end


def _connect(
    plan: ParallelPlan, rank: int, store: dist.Store, timeout_s: float
) -> dist.ProcessGroup | None:
    """The group for control traffic among the plan's ranks; None for a single one."""
    if plan.world_size == 1:
        return None
    return connect_ranks(
        store,
        rank=rank,
        world_size=plan.world_size,
        backend=choose_backend({_device_of(plan, r.rank).type for r in plan.ranks}),
        timeout_s=timeout_s,
    )


def _device_of(plan: ParallelPlan, rank: int) -> torch.device:
    """Where a rank really runs: its own CUDA device, or the CPU that stands in for another."""
    rank_plan = plan.ranks[rank]
    kind = DEVICES[rank_plan.device].kind
    if plan.emulation is None and kind is DeviceKind.CUDA:
        return torch.device("cuda", rank_plan.local_rank)
    return torch.device("cpu")


def _compare_plans(plan: ParallelPlan, exchange: Exchange) -> None:
    """Stop before training if a rank has read another plan."""
    mine = float(int(plan.fingerprint()[:12], 16))
    theirs = [row[0] for row in exchange.all_gather([mine])]
    if any(value != mine for value in theirs):
        different = [rank for rank, value in enumerate(theirs) if value != theirs[0]]
        raise HeteroError(
            f"ranks {different} read another plan than rank 0. All ranks must see the same run "
            "directory; check that its file system is shared and not cached."
        )


def _quieten() -> None:
    """Silence remarks that mean nothing here; real warnings stay."""
    faulthandler.enable()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Loader workers and loggers are the user's choice, made in the configuration.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")
    # A run may have been killed after its last checkpoint and before it said so.
    warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero.*")
    # Without trainer.val_interval_steps the run is not meant to validate.
    warnings.filterwarnings("ignore", message=".*have no `val_dataloader`.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
