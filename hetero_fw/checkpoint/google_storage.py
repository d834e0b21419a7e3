"""The client of gs:// URLs: gcsfs over HTTP alone, with bounded tries. Imported where it is used.

What gcsfs takes by itself asks Google by gRPC first what kind of bucket it has, for a minute at
each request where gRPC does not get through, and keeps threads that do not outlive a fork. Only
zonal buckets need it.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from fsspec import register_implementation
from gcsfs.core import GCSFileSystem
from gcsfs.retry import retry_request

from hetero_fw.checkpoint.storage import (
    CONNECT_TIMEOUT_S,
    NUM_ATTEMPTS,
    READ_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
)


class HttpGoogleFileSystem(GCSFileSystem):  # type: ignore[misc]  # it has no types
    """gcsfs that tries a request as often as other clients do, where its own number is fixed."""

    _request: Any = retry_request(retries=NUM_ATTEMPTS)(GCSFileSystem._request.__wrapped__)


def register(scheme: str) -> None:
    """Make it the client of `scheme` in this process.

    Raises:
        ImportError: gcsfs is not installed.
    """
    register_implementation(scheme, HttpGoogleFileSystem, clobber=True)
    # gcsfs hands aiohttp a whole part at a time, as this asks it to.
    warnings.filterwarnings("ignore", message="Sending a large body directly")
    # It logs a traceback for every error that it raises as well.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def bound_requests(client: HttpGoogleFileSystem) -> None:
    """Limit how long each request takes, where the options do not. aiohttp allows 300 s."""
    from aiohttp import ClientTimeout

    if client.requests_timeout is None:
        client.requests_timeout = ClientTimeout(
            total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
        )
