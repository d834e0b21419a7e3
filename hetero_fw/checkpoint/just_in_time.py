"""Save the step that all ranks stand at when one of them has raised, without a collective.

A rank that raises in the middle of a step leaves its peers waiting for it: no rank can change its
weights before all have given their gradients. So every shard of the last finished step is still
there, and each rank can save its own from a thread beside the one that waits. The idea is that of
"Just-In-Time Checkpointing" (Gupta et al., EuroSys 2024, https://doi.org/10.1145/3627703.3650085).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from hetero_fw.checkpoint.rank_store import RankStore
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.save_planner import SaveContent
from hetero_fw.checkpoint.saver import CheckpointSaver
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import Tier

_REQUEST = "just_in_time/request"
_VERDICT = "just_in_time/verdict"
# How often a rank looks for a request; what an idle store has to bear.
_LOOK_S = 0.1
# Ranks that are alive answer within one look, unless something holds their interpreter up.
_ANSWER_S = 3.0
# The rank that asks waits as long as that for the others, and then has to tell them.
_VERDICT_S = _ANSWER_S + 1.0


@dataclass(frozen=True, kw_only=True)
class StandingStep:
    """A rank's training between two changes of its weights.

    Attributes:
        step: optimizer steps completed.
        content: what a save of it holds, for a reason; asked in another thread than the training's.
            Raises CheckpointError if it does not stand any more.
        mark: place in the device's work after which the weights stand still, and by which what
            `content` reads is computed; None on a CPU.
    """

    step: int
    content: Callable[[str], SaveContent]
    mark: torch.cuda.Event | None = None


@dataclass(frozen=True, kw_only=True)
class _Request:
    rank: int
    step: int
    reason: str
    tiers: tuple[str, ...]
    timeout_s: float

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: bytes) -> _Request:
        data = json.loads(text)
        return cls(**{**data, "tiers": tuple(data["tiers"])})


class JustInTimeSave:
    """One rank's part in a save that begins when a rank has raised; at most one in an attempt.

    The training thread says when its weights stand still and when they move. A thread beside it
    looks for a request. First every rank says whether it stands at the step that is asked for,
    and holds still; then, unless one refused, all of them save.

    Attributes:
        has_led: this rank was the first to ask.

    Args:
        saver: of this rank, prepared for the tensors that the standing steps have.
        store: seen by all ranks; None for a single one.
    """

    def __init__(
        self, saver: CheckpointSaver, store: Store | None, *, rank: int, world_size: int
    ) -> None:
        self._saver = saver
        self._store = RankStore(store, world_size=world_size)
        self._rank = rank
        self._world_size = world_size
        self._standing: StandingStep | None = None
        self._lock = threading.Lock()
        self._has_stopped = threading.Event()
        self._has_ended = threading.Event()
        self._handle: SaveHandle | None = None
        self._end: SaveOutcome | str = "no rank has asked for it"
        self.has_led = False
        self._thread = threading.Thread(target=self._watch, name="just-in-time", daemon=True)

    def start(self) -> None:
        """Look for requests from here on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Harmless when called twice or before `start`."""
        self._has_stopped.set()

    def stand(self, standing: StandingStep) -> None:
        """Training thread: the weights stay as they are until `move`."""
        with self._lock:
            self._standing = standing

    def move(self) -> None:
        """Training thread: the weights change now. Waits while they are being copied; bounded."""
        with self._lock:
            self._standing = None

    @property
    def step(self) -> int | None:
        """The step that this rank stands at; None while its weights change."""
        standing = self._standing
        return standing.step if standing is not None else None

    def ask(self, reason: str, tiers: Sequence[Tier], timeout_s: float) -> SaveOutcome | str:
        """Have all ranks save the step that this one stands at; called by one that has raised.

        If another has asked before, takes part in that.

        Returns:
            What became of it, or in words why there is none. After `timeout_s` at the latest; the
            save may still be under way then.
        """
        step = self.step
        if step is None:
            return f"the weights of rank {self._rank} were changing"
        began_s = time.monotonic()
        mine = _Request(
            rank=self._rank, step=step, reason=reason, tiers=tuple(tiers), timeout_s=timeout_s
        )
        try:
            asked = self._store.set_first(_REQUEST, mine.to_json())
            if _Request.from_json(asked).rank == self._rank:
                self.has_led = True
                self._lead()
        except CheckpointError as error:
            return str(error)
        if not self._has_ended.wait(max(0.0, began_s + timeout_s - time.monotonic())):
            if self._handle is not None and self._handle.outcome is not None:
                return self._handle.outcome  # what is still on its way goes further
            return f"it did not end within {timeout_s:.3g} s"
        return self._end

    def _lead(self) -> None:
        """Hear what every rank says, and tell all of them whether to save."""
        keys = [_answer_key(rank) for rank in range(self._world_size)]
        self._store.wait(keys, time.monotonic() + _ANSWER_S)
        refusals = [
            f"rank {rank}: {text}" for rank, text in enumerate(map(self._read, keys)) if text
        ]
        self._store.set(_VERDICT, "; ".join(refusals))

    def _read(self, key: str) -> str:
        if not self._store.has([key]):
            return f"no answer within {_ANSWER_S:.3g} s"
        return self._store.get(key).decode()

    def _watch(self) -> None:
        try:
            while not self._store.has([_REQUEST]):
                if self._has_stopped.wait(_LOOK_S):
                    return
            self._end = self._take_part(_Request.from_json(self._store.get(_REQUEST)))
        except Exception as error:  # noqa: BLE001  # thread boundary; the rank that asked has a bound
            self._end = str(error) or repr(error)
        self._has_ended.set()

    def _take_part(self, request: _Request) -> SaveOutcome | str:
        # Held until the tensors are copied, so that what this rank says stays true.
        if not self._lock.acquire(timeout=_ANSWER_S):
            return self._answer("the weights were changing")
        try:
            standing = self._standing
            content = self._content(request, standing)
            refusal = self._answer(content if isinstance(content, str) else "")
            if refusal or standing is None or isinstance(content, str):
                return refusal
            self._handle, finish = self._saver.stage_standing(
                content,
                tiers=[Tier(tier) for tier in request.tiers],
                after=standing.mark,
                wait_s=request.timeout_s,
            )
        finally:
            self._lock.release()
        finish()
        assert self._handle.outcome is not None
        return self._handle.outcome

    def _content(self, request: _Request, standing: StandingStep | None) -> SaveContent | str:
        """What this rank would save, or in words why it cannot take part."""
        if standing is None:
            return "the weights were changing"
        if standing.step != request.step:
            return f"stands at step {standing.step}, not at {request.step}"
        try:
            with _on_own_stream(standing.mark):
                content = standing.content(request.reason)
        except CheckpointError as error:
            return str(error)
        if not self._saver.is_prepared(content.tensors):
            return "the tensors are not those that saves were planned for"
        return content

    def _answer(self, problem: str) -> str:
        """Tell the rank that asked; returns why nobody saves, empty if all do."""
        self._store.set(_answer_key(self._rank), problem)
        if not self._store.wait([_VERDICT], time.monotonic() + _VERDICT_S):
            return "the rank that asked did not go on"
        return self._store.get(_VERDICT).decode()


@contextmanager
def _on_own_stream(mark: torch.cuda.Event | None) -> Iterator[None]:
    """Have what this thread asks of the device wait for `mark` alone; nothing changes on a CPU.

    All threads share one stream unless they name another. In that one it would wait for the
    collective that never ends.
    """
    if mark is None:
        yield
        return
    # A thread begins at device 0; to stay there makes a context on it, as in `StagingBuffer.copy`.
    torch.cuda.set_device(mark.device)
    stream = torch.cuda.Stream(mark.device)
    stream.wait_event(mark)
    with torch.cuda.stream(stream):
        yield


def _answer_key(rank: int) -> str:
    return f"just_in_time/answer/{rank}"
