"""Each attempt sees its own keys of the run's store."""

from __future__ import annotations

import torch.distributed as dist

from hetero_fw.recovery import StoreAddress
from hetero_fw.recovery.store import LOOPBACK


def test_attempts_do_not_see_each_other() -> None:
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    address = StoreAddress(host=LOOPBACK, port=server.port)
    first, second = address.connect(0, 10.0), address.connect(1, 10.0)
    first.set("key", "dead")
    assert not second.check(["key"])
    second.set("key", "alive")
    assert first.get("key") == b"dead"
    assert address.connect(1, 10.0).get("key") == b"alive"
