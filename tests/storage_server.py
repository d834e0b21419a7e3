"""What the storage servers of the tests have in common: one process each, on loopback alone."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUCKET = "ckpt"
START_S = 40.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class StorageServer(ABC):
    """A server that keeps its data in `folder` on ports of 127.0.0.1, with the bucket `BUCKET`.

    Attributes:
        scheme: of the URLs that lead to it.
    """

    scheme: str

    def __init__(self, folder: Path, num_ports: int) -> None:
        self._folder = folder
        self._ports = _free_ports(num_ports)
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def root(self, endpoint: str | None = None) -> str:
        """URL of the bucket, as it is reached through `endpoint`."""
        return f"{self.scheme}://{BUCKET}"

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """What clients read: login, endpoint, and not to take a proxy for it."""

    @abstractmethod
    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """The same as options of the client."""

    @abstractmethod
    def command(self) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def probe(self) -> None:
        """Make the bucket if there is none and put something; raises while it is not up."""

    def start(self) -> None:
        """Start it on the data that it has, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_tests,
            )
        self._wait_until_up(self._process)

    def kill(self) -> None:
        """SIGKILL, as in a crash; `start` goes on with what is on the disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None

    def close(self) -> None:
        """End everything that was started."""
        self.kill()

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self.probe()
            except Exception as error:
                # Whatever a server that is starting answers, or a client makes of it.
                if time.monotonic() > deadline_s or process.poll() is not None:
                    log = (self._folder / "log").read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{self.scheme} server is not up: {error}\n{log}") from error
                time.sleep(0.1)
            else:
                return


@contextlib.contextmanager
def running(server: StorageServer) -> Iterator[None]:
    """The server runs in the block, and is gone when that ends."""
    try:
        server.start()
        yield
    finally:
        server.close()


def die_with_tests() -> None:
    """In the server, before it becomes one: it does not outlive a killed test run."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
