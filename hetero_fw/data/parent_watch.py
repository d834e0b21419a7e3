"""Loader workers leave with the rank that started them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def leave_with_parent(worker_id: int) -> None:
    """End this worker as soon as its rank is gone. Runs in each worker, as `worker_init_fn`.

    torch's workers look whether their parent process id changes. Under forkserver that parent is
    the fork server, which in turn lives as long as any of its children: after SIGKILL of the rank
    both would wait for each other for ever. The sentinel belongs to the rank itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(f"loader worker {worker_id} has no parent process to watch")
    threading.Thread(
        target=_exit_after, args=(parent.sentinel,), name="parent-watch", daemon=True
    ).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    # The rank is gone: nobody reads what an orderly exit would flush, and it could block.
    os._exit(1)
