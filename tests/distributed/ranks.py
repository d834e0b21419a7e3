"""Run a function on a few gloo ranks, with a bound on everything and no process left behind."""

from __future__ import annotations

import multiprocessing
import queue
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hetero_fw.recovery import StoreAddress, die_with_parent, share_fork_server
from hetero_fw.recovery.store import LOOPBACK

TIMEOUT_S = 60.0
PRELOAD = ["torch", "torch.distributed.fsdp", "lightning.pytorch", "hetero_fw.checkpoint"]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call `function(rank, group, *args)` on each rank; results in rank order.

    `function` must live at module level. A failure of any rank fails the call with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    results: Any = context.Queue()
    processes = [
        context.Process(
            target=_enter, args=(function, rank, world_size, server.port, results, args, timeout_s)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(results, world_size, timeout_s)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join(5.0)


def _collect(results: Any, world_size: int, timeout_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < world_size:
        try:
            rank, value, error = results.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"only ranks {sorted(found)} answered") from None
        assert not error, f"rank {rank}:\n{error}"
        found[rank] = value
    return [found[rank] for rank in range(world_size)]


def _enter(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    from hetero_fw.parallel import connect_ranks, disconnect_ranks

    die_with_parent()
    share_fork_server()  # as ranks of a run do: it has everything imported
    torch.set_num_threads(1)
    try:
        store = StoreAddress(host=LOOPBACK, port=port).connect(0, TIMEOUT_S)
        group = connect_ranks(
            store, rank=rank, world_size=world_size, backend="gloo", timeout_s=timeout_s
        )
        results.put((rank, function(rank, group, *args), ""))
        disconnect_ranks()
    except BaseException:  # noqa: BLE001  # reported to the test, which fails with it
        results.put((rank, None, traceback.format_exc()))
