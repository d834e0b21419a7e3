"""The agent of one node: a torch elastic agent that starts and watches the node's ranks.

One attempt is one elastic run without restarts. What comes after a failure is decided in one
place, the supervisor, which ends every agent and begins the next attempt with fresh ones: so
attempts are numbered alike everywhere and no rendezvous ever meets its own past.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hetero_fw.recovery import rendezvous
from hetero_fw.recovery.fork_server import share_fork_server
from hetero_fw.recovery.lifeline import die_with_parent
from hetero_fw.recovery.store import StoreAddress


@dataclass(frozen=True, kw_only=True)
class AgentJob:
    """What one agent does in one attempt.

    Attributes:
        run_id: names the rendezvous; different for every attempt.
        num_nodes: agents that meet in the rendezvous; `node_index` is this one's place.
        num_ranks: ranks on this node.
        entrypoint: module-level function that each rank runs, with `argument`.
        start_timeout_s: bound on meeting the other agents.
        log_path: directory for what torch elastic writes down; by default it would leave a
            temporary directory behind.
    """

    run_id: str
    store: StoreAddress
    num_nodes: int
    node_index: int
    num_ranks: int
    entrypoint: Callable[[str], None]
    argument: str
    start_timeout_s: float
    log_path: Path


def run_agent(job: AgentJob) -> None:
    """Run the node's ranks to their end; exit status 1 if one failed.

    Signals that mean "stop" are left to the supervisor and the ranks: a terminal or a batch
    system sends them to everybody, and an agent that obeyed would kill ranks that still save.
    """
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    share_fork_server()
    os.environ["TORCH_MP_PARALLEL_START"] = "0"
    rendezvous.register()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    job.log_path.mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=job.num_nodes,
        max_nodes=job.num_nodes,
        nproc_per_node=job.num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.log_path)),
        run_id=job.run_id,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=f"{job.store.host}:{job.store.port}",
        rdzv_configs={"rank": job.node_index, "timeout": job.start_timeout_s},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        local_addr=job.store.host,
        signals_to_handle="SIGHUP",
    )
    try:
        elastic_launch(config, job.entrypoint)(job.argument)
    except ChildFailedError:
        # The rank has left its own report; this status only says that the node's part failed.
        raise SystemExit(1) from None
