"""A TCP proxy that breaks the way to a storage server in every way that a network can."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from enum import StrEnum


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
