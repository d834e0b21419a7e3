"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture(autouse=True)
def _own_storage_clients() -> Iterator[None]:
    """Clients know the environment that they were made in, and fsspec keeps them."""
    _forget_storage_clients()
    yield
    _forget_storage_clients()


def _forget_storage_clients() -> None:
    for client in fsspec.registry.values():
        client.clear_instance_cache()
