"""What the other servers of the tests do not have: a login that is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from hetero_fw.checkpoint import (
    ObjectPlace,
    Ranks,
    StorageError,
    TierRoot,
    find_candidates,
    open_root,
)
from hetero_fw.errors import CheckpointError
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server
from tests.storage.places import begin, steps
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.object_saves import save_at

# The server starts within seconds, but several processes share few cores.
pytestmark = pytest.mark.timeout(180)


def test_a_wrong_secret_is_told_at_once(s3: S3Server, proxy: FaultProxy, url: str) -> None:
    options = {**s3.options(proxy.endpoint), "secret": "not-the-secret"}
    place = ObjectPlace(url=url, attempt=0, options=options)
    requests: list[Callable[[], Any]] = [
        place.claim,
        lambda: save_at(place, 10),
        lambda: steps(place),
    ]
    for request in requests:
        began_s, before = time.monotonic(), proxy.num_requests
        with pytest.raises(StorageError) as caught:
            request()
        assert not caught.value.is_transient
        assert time.monotonic() - began_s < 8.0  # trying again takes longer
        assert proxy.num_requests - before <= 1  # nothing was tried again
        assert "signature" in str(caught.value)
        assert "not-the-secret" not in str(caught.value)
    assert place.fenced_by() is None


def test_a_wrong_login_is_no_fresh_start(s3: S3Server, proxy: FaultProxy, url: str) -> None:
    save_at(begin(url), 10)
    began_s = time.monotonic()
    root = open_root(url, {**s3.options(proxy.endpoint), "secret": "not-the-secret"})
    candidates = find_candidates(
        Ranks(None),
        [TierRoot(tier="storage", path=root)],
        PREFIX,
        refuse=lambda manifest: None,
        on_rejected=lambda rejection: pytest.fail(rejection.reason),
    )
    with pytest.raises(CheckpointError, match="signature"):
        next(candidates, None)
    assert time.monotonic() - began_s < 3.0
