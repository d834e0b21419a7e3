"""The client of webhdfs:// URLs: fsspec's, made to keep what object stores promise.

A file appears there when its first bytes do. Small files are therefore written beside their place
and renamed into it, which HDFS does at once or, where the place is taken, not at all.
"""

from __future__ import annotations

import uuid
from typing import Any

import requests
from fsspec import register_implementation
from fsspec.implementations.webhdfs import WebHDFS

from hetero_fw.checkpoint.storage import CONNECT_TIMEOUT_S, READ_TIMEOUT_S


class BoundedSession(requests.Session):
    """Gives up a connection that stays silent, and takes no error for content."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        options.setdefault("timeout", (CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
        return super().request(*args, **options)

    def get(self, *args: Any, **options: Any) -> requests.Response:
        # fsspec reads from data nodes with this and does not look at the status.
        response = super().get(*args, **options)
        response.raise_for_status()
        return response


class HadoopFileSystem(WebHDFS):  # type: ignore[misc]  # it has no types
    """WebHDFS with whole small files, conditional creation and time limits."""

    def _connect(self) -> None:
        super()._connect()
        as_configured: requests.Session = self.session
        self.session: requests.Session = BoundedSession()
        for name in ("auth", "cert", "verify"):
            setattr(self.session, name, getattr(as_configured, name))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        found = super().ls(path, detail=True, **options)
        for info in found:
            info["mtime"] = info["modificationTime"] / 1e3
        return found if detail else [info["name"] for info in found]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Create or replace a file at once; with `mode` "create" only if it is not there.

        Raises:
            FileExistsError: it is there.
        """
        part = f"{self._parent(path)}/.tmp.{uuid.uuid4().hex}"
        try:
            place = self._call("CREATE", "put", part, redirect=False, overwrite="true")
            location = self._apply_proxy(place.headers["Location"])
            content = {"content-type": "application/octet-stream"}
            self.session.put(location, data=value, headers=content).raise_for_status()
            replace = {} if mode == "create" else {"renameoptions": "OVERWRITE"}
            answer = self._call("RENAME", "put", part, destination=path, **replace)
            # Without options it says whether it did; with them it says nothing and has done it.
            if mode == "create" and not answer.json()["boolean"]:
                raise FileExistsError(path)
        except BaseException:
            self._forget(part)
            raise

    def _forget(self, part: str) -> None:
        try:
            self.rm(part)
        except Exception:  # noqa: BLE001  # why it is given up matters more
            return

    def rmdir(self, path: str) -> None:
        """Delete a directory if it is empty."""
        self.rm(path)


def register(scheme: str) -> None:
    """Make it the client of `scheme` in this process."""
    register_implementation(scheme, HadoopFileSystem, clobber=True)
