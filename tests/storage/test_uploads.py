"""Servers and ways to them that break in the middle of an upload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from hetero_fw.checkpoint import ObjectPlace, StorageError, published_paths, verify_checkpoint
from tests.fault_proxy import Fault, FaultProxy
from tests.storage.places import begin, keys, steps, through, unfinished_uploads
from tests.storage.uploading import BIG, saving_process, wait_for
from tests.storage_server import StorageServer
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.object_saves import save_at

# With WebHDFS the bytes go another way than the requests.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("server", ["s3", "gs"], indirect=True),
]


@contextmanager
def in_mid_upload(
    proxy: FaultProxy, server: StorageServer, url: str
) -> Iterator[tuple[ObjectPlace, BaseProcess]]:
    """Step 10 is saved, and a process, killed when the block ends, has sent a part of step 20."""
    begin(url)
    place = through(proxy, server, url)
    save_at(place, 10)
    proxy.sent_bytes = 0
    proxy.rate_bytes_per_s = 20_000_000
    with saving_process(place, 20, size=BIG) as process:
        wait_for(lambda: proxy.sent_bytes > 8_000_000, "some of it is sent")
        yield place, process
    proxy.rate_bytes_per_s = None


def test_a_server_that_dies_in_mid_upload_leaves_nothing_that_looks_committed(
    server: StorageServer, proxy: FaultProxy, url: str
) -> None:
    with in_mid_upload(proxy, server, url) as (place, process):
        server.kill()
        process.join(60.0)
        assert process.exitcode == 3
    server.start()
    assert steps(place) == [10]
    assert not [key for key in keys(place) if "step-00000020" in key]
    save_at(place, 20, size=BIG)
    assert steps(place) == [20, 10]
    verify_checkpoint(next(published_paths(place.root, PREFIX)))
    begin(url, 1)
    assert unfinished_uploads(place) == []
    assert steps(place) == [20, 10]


def test_an_upload_into_a_black_hole_is_cut_by_killing_the_writer(
    server: StorageServer, proxy: FaultProxy, url: str
) -> None:
    with in_mid_upload(proxy, server, url) as (place, process):
        proxy.fault = Fault.BLACK_HOLE
        process.join(2.0)  # the caller's deadline
        assert process.is_alive()
    proxy.fault = Fault.NONE
    assert steps(place) == [10]
    save_at(place, 20, size=BIG)
    assert steps(place) == [20, 10]
    assert len(unfinished_uploads(place)) == (server.scheme == "s3")
    begin(url, 1)
    assert unfinished_uploads(place) == []


def test_connections_that_break_in_mid_upload_are_made_again(
    server: StorageServer, proxy: FaultProxy, url: str
) -> None:
    begin(url)
    place = through(proxy, server, url)
    proxy.limit_bytes, proxy.fault = 10_000_000, Fault.RESET_AFTER
    with pytest.raises(StorageError) as caught:
        save_at(place, 20, size=BIG)
    assert caught.value.is_transient
    assert steps(place) == []
    proxy.fault = Fault.NONE
    save_at(place, 20, size=BIG)
    verify_checkpoint(next(published_paths(place.root, PREFIX)))
