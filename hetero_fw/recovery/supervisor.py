"""Run attempts until the run is done: start agents, watch every rank, decide, start again."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess

import torch.distributed as dist

from hetero_fw.monitoring import (
    EventLog,
    EventName,
    RunDirectory,
    Status,
    attempt_starts,
    last_step,
    read_events,
    write_status,
)
from hetero_fw.policies import FailureKind, RestartDecision, decide_restart
from hetero_fw.recovery.agent import AgentJob, run_agent
from hetero_fw.recovery.attempt import AttemptFiles, NodeRanks, RankEnd
from hetero_fw.recovery.config import RecoveryConfig
from hetero_fw.recovery.ending import LOST, has_checkpoint, judge_ending
from hetero_fw.recovery.failure import RankFailure
from hetero_fw.recovery.fork_server import start_fork_server
from hetero_fw.recovery.heartbeat import Silence
from hetero_fw.recovery.processes import Watched, kill_all, wait_any
from hetero_fw.recovery.relay import SignalRelay
from hetero_fw.recovery.run_place import RunPlace
from hetero_fw.recovery.stop import SaveRequest, StopRequest
from hetero_fw.recovery.store import LOOPBACK, StoreAddress

_POLL_S = 0.5
_START_POLL_S = 0.02
_REPORT_GRACE_S = 0.3
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """One attempt: which ranks on which nodes, and what each rank is told."""

    attempt: int
    nodes: tuple[NodeRanks, ...]
    argument: str


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How the run ended."""

    status: Status
    step: int
    attempt: int
    reason: str


class Supervisor:
    """Owns the processes of a run. One at a time per run directory; main thread only.

    Args:
        entrypoint: module-level function that every rank runs.
        preload: modules that the fork server imports once, so that a restart need not.
        stop: where stop signals are noted; they are passed on to every rank.
        save: where signals are noted after which the run goes on; one rank is told.
        announce: shows a failure to people, once.
        first_attempt: least number of an attempt; checkpoints elsewhere may know of earlier ones.
    """

    def __init__(
        self,
        *,
        run_dir: RunDirectory,
        config: RecoveryConfig,
        entrypoint: Callable[[str], None],
        preload: Sequence[str],
        stop: StopRequest,
        save: SaveRequest,
        announce: Callable[[str], None],
        first_attempt: int = 0,
    ) -> None:
        self.announce = announce
        self._first_attempt = first_attempt
        self._run_dir = run_dir
        self.place = RunPlace(run_dir)
        self._config = config
        self._entrypoint = entrypoint
        self._stop = stop
        self._save = save
        self._context = multiprocessing.get_context("forkserver")
        start_fork_server(preload)
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    @property
    def store(self) -> StoreAddress:
        """The store that all attempts share; it lives as long as this process."""
        return StoreAddress(host=LOOPBACK, port=self._store.port)

    def run(self, prepare: Callable[[int], AttemptSpec]) -> RunOutcome:
        """Run attempts until one ends well or a restart makes no sense.

        Args:
            prepare: writes what attempt number n needs and describes it.
        """
        attempt = self._next_attempt()
        best_step = last_step(self._run_dir.metrics_path)
        without_progress = 0
        while True:
            spec = prepare(attempt)
            write_status(self._run_dir.status_path, Status.RUNNING, best_step, attempt)
            with EventLog(self._run_dir.events_path, attempt) as events:
                result = _Attempt(self, spec, events).run()
                if not isinstance(result, RankFailure):
                    return self._finished(result, attempt)
                step = last_step(self._run_dir.metrics_path)
                progressed, best_step = step > best_step, max(step, best_step)
                decision = decide_restart(
                    result.kind,
                    progressed=progressed,
                    restarts_without_progress=without_progress,
                    max_restarts=self._config.max_restarts,
                )
                is_over = self._stop.signal_number or self.place.is_gone
                if is_over or not decision.should_restart:
                    return self._given_up(result, decision, best_step, attempt)
                without_progress = decision.restarts_without_progress
                events.write(EventName.RESTART, step=step, reason=decision.reason)
            time.sleep(self._config.backoff_s * without_progress)
            attempt = self._next_attempt()

    def _next_attempt(self) -> int:
        """Counted on from what is on disk: a later supervisor may have begun attempts."""
        return max([*self._run_dir.attempt_numbers(), self._first_attempt - 1]) + 1

    def _finished(self, end: RankEnd, attempt: int) -> RunOutcome:
        # No row tells of steps that were trained in a run directory which is gone.
        starts = attempt_starts(read_events(self._run_dir.events_path))
        restored = max((s.start_step for s in starts if s.attempt == attempt), default=0)
        step = max(last_step(self._run_dir.metrics_path), restored)
        if end is RankEnd.DONE:
            return RunOutcome(status=Status.DONE, step=step, attempt=attempt, reason="")
        name = _signal_name(self._stop.signal_number)
        reason = f"stopped by {name} after step {step}; the same command goes on"
        return RunOutcome(status=Status.PREEMPTED, step=step, attempt=attempt, reason=reason)

    def _given_up(
        self, failure: RankFailure, decision: RestartDecision, step: int, attempt: int
    ) -> RunOutcome:
        if self.place.is_gone:
            reason = self.place.tell_loss()
            self.announce(f"FAILED: {reason}")
            return RunOutcome(status=Status.FAILED, step=step, attempt=attempt, reason=reason)
        number = self._stop.signal_number
        end = judge_ending(
            failure,
            decision,
            signal_name=_signal_name(number) if number else "",
            killed_after_s=self._config.grace_s if self.relay().is_grace_over else None,
            has_checkpoint=lambda: has_checkpoint(self._run_dir.events_path),
        )
        return RunOutcome(status=end.status, step=step, attempt=attempt, reason=end.reason)

    def start_agent(self, spec: AttemptSpec, node: NodeRanks) -> ForkServerProcess:
        """Start the agent of one node."""
        job = AgentJob(
            run_id=f"{self._run_dir.name}-{spec.attempt}",
            store=self.store,
            num_nodes=len(spec.nodes),
            node_index=spec.nodes.index(node),
            num_ranks=node.num_ranks,
            entrypoint=self._entrypoint,
            argument=f"{node.first_rank}:{spec.argument}",
            log_path=self._run_dir.attempt_path(spec.attempt) / "agents",
            start_timeout_s=self._config.start_timeout_s,
        )
        process = self._context.Process(target=run_agent, args=(job,), name=f"agent-{node.node}")
        process.start()
        return process

    @property
    def config(self) -> RecoveryConfig:
        return self._config

    def relay(self) -> SignalRelay:
        """What passes signals on to the ranks of one attempt."""
        return SignalRelay(self._stop, self._save, grace_s=self._config.grace_s)

    @property
    def run_dir(self) -> RunDirectory:
        return self._run_dir


class _Attempt:
    """Watches the processes of one attempt from start to end."""

    def __init__(self, supervisor: Supervisor, spec: AttemptSpec, events: EventLog) -> None:
        self._supervisor = supervisor
        self._config = supervisor.config
        self._spec = spec
        self._events = events
        self._files = AttemptFiles(supervisor.run_dir.attempt_path(spec.attempt) / "ranks")
        self._node_of = {rank: node.node for node in spec.nodes for rank in node.ranks}
        self._ranks: dict[int, Watched] = {}
        self._silences: dict[int, Silence] = {}
        self._agents: dict[str, ForkServerProcess] = {}
        self._relay = supervisor.relay()
        self._step = -1

    def run(self) -> RankEnd | RankFailure:
        """Start everything, watch it, and leave no process behind."""
        try:
            for node in self._spec.nodes:
                self._agents[node.node] = self._supervisor.start_agent(self._spec, node)
            failure = self._watch()
        finally:
            self._end_processes()
        if failure is not None:
            self._report(failure)
            return failure
        ends = {self._files.end(rank) for rank in self._node_of}
        end = RankEnd.DONE if ends == {RankEnd.DONE} else RankEnd.PREEMPTED
        self._events.write(EventName.ATTEMPT_END, outcome=end.value)
        return end

    def _watch(self) -> RankFailure | None:
        """Return the first failure, or None once every rank has ended on purpose."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        while True:
            self._find_ranks()
            self._relay.forward(list(self._ranks.values()))
            self._update_status()
            failure = self._find_failure()
            if failure is not None:
                return failure
            if self._have_all_ended():
                return None
            has_started = len(self._ranks) == len(self._node_of)
            if not has_started and time.monotonic() > deadline_s:
                return self._did_not_start()
            running = [rank for rank in self._ranks.values() if not rank.has_ended]
            sentinels = [agent.sentinel for agent in self._agents.values() if agent.is_alive()]
            wait_any(running, sentinels, _POLL_S if has_started else _START_POLL_S)

    def _find_ranks(self) -> None:
        for rank in self._node_of:
            if rank not in self._ranks:
                pid = self._files.pid(rank)
                if pid is not None:
                    self._ranks[rank] = Watched(pid)
                    # A rank may also hang before its first beat.
                    self._silences[rank] = Silence(
                        self._files.pid_path(rank), self._files.heartbeat_path(rank)
                    )

    def _update_status(self) -> None:
        run_dir = self._supervisor.run_dir
        step = last_step(run_dir.metrics_path)
        if step != self._step:
            with suppress(OSError):  # a disk that is full for a moment; it is tried again
                write_status(run_dir.status_path, Status.RUNNING, step, self._spec.attempt)
                self._step = step

    def _have_all_ended(self) -> bool:
        if len(self._ranks) < len(self._node_of):
            return False
        return all(self._files.end(rank) for rank in self._ranks) and all(
            rank.has_ended for rank in self._ranks.values()
        )

    def _find_failure(self) -> RankFailure | None:
        dead = self._ranks_that_died()
        if dead:
            self._wait_for_reports(dead)
            return self._cause(dead)
        for node in self._spec.nodes:
            agent = self._agents[node.node]
            finished = all(self._files.end(rank) for rank in node.ranks)
            if not agent.is_alive() and not finished:
                return self._agent_failure(node)
        return self._silent_rank()

    def _ranks_that_died(self) -> list[int]:
        return [
            rank
            for rank, process in self._ranks.items()
            if process.has_ended and self._files.end(rank) is None
        ]

    def _wait_for_reports(self, dead: list[int]) -> None:
        """Give reports that are being written a moment: the earliest one is the cause."""
        end_s = time.monotonic() + _REPORT_GRACE_S
        while time.monotonic() < end_s:
            reported = {failure.rank for failure in self._files.failures()}
            if any(rank not in reported for rank in dead):
                return
            wait_any([], [], 0.05)

    def _cause(self, dead: list[int]) -> RankFailure:
        """A rank that was killed left no report; if all did report, the first to do so began."""
        reports = {failure.rank: failure for failure in self._files.failures()}
        killed = [rank for rank in dead if rank not in reports]
        if killed or not reports:
            return self._failure(
                killed[0] if killed else dead[0],
                FailureKind.PROCESS_KILLED,
                "the process was killed or crashed without a last word",
            )
        return min(reports.values(), key=lambda failure: failure.time_s)

    def _agent_failure(self, node: NodeRanks) -> RankFailure:
        exitcode = self._agents[node.node].exitcode
        detail = f"the agent of node {node.node} is gone (exit code {exitcode})"
        reports = self._files.failures()
        if reports:
            return reports[0]
        return self._failure(node.first_rank, FailureKind.AGENT_LOST, detail)

    def _silent_rank(self) -> RankFailure | None:
        limit_s = self._config.heartbeat_interval_s * self._config.heartbeat_max_missed
        for rank, silence in self._silences.items():
            silent_s = silence.look()
            if silent_s <= limit_s:
                continue
            if self._files.end(rank) is not None:
                # Its work is done; a thread of the user's or of a logger keeps it from leaving.
                self._ranks[rank].send(signal.SIGKILL)
                continue
            detail = f"no sign of life for {silent_s:.1f} s (limit {limit_s:.1f} s)"
            self._events.write(EventName.HEARTBEAT_MISSED, failed_rank=rank, detail=detail)
            return self._failure(rank, FailureKind.HEARTBEAT_MISSED, detail)
        return None

    def _did_not_start(self) -> RankFailure:
        missing = next(rank for rank in self._node_of if rank not in self._ranks)
        detail = f"the rank did not start within {self._config.start_timeout_s:.0f} s"
        return self._failure(missing, FailureKind.AGENT_LOST, detail)

    def _failure(self, rank: int, kind: FailureKind, detail: str) -> RankFailure:
        return RankFailure(
            rank=rank, node=self._node_of[rank], kind=kind, time_s=time.time(), detail=detail
        )

    def _report(self, failure: RankFailure) -> None:
        """Log the cause and show it once: what the other ranks met follows from it."""
        if self._relay.has_stopped and failure.kind in LOST:
            # Somebody asked for this end, by SIGINT twice or longer ago than ranks had time for.
            self._events.write(EventName.ATTEMPT_END, outcome="stopped")
            return
        who = f"rank {failure.rank} on {failure.node}"
        # The trace of a configuration error leads through this framework, not to the mistake.
        trace = "" if failure.kind is FailureKind.CONFIGURATION else failure.trace
        if not self._supervisor.place.is_gone:  # else that is the cause, and told by itself
            self._supervisor.announce(f"{trace}FAILURE {who}: {failure.detail}")
        self._events.write(
            EventName.FAILURE_DETECTED,
            step=last_step(self._supervisor.run_dir.metrics_path),
            failed_rank=failure.rank,
            node=failure.node,
            kind=failure.kind.value,
            detail=failure.detail,
            failed_time_s=failure.time_s,
        )
        self._events.write(EventName.ATTEMPT_END, outcome="failed")

    def _end_processes(self) -> None:
        """End what is left. Agents that still wait for each other get a moment to leave."""
        has_failed = not self._have_all_ended()
        for agent in self._agents.values():
            if has_failed:
                agent.kill()
            agent.join(_KILL_TIMEOUT_S)
            if agent.is_alive():
                agent.kill()
                agent.join(_KILL_TIMEOUT_S)
        self._find_ranks()
        kill_all(list(self._ranks.values()), _KILL_TIMEOUT_S)
        for rank in self._ranks.values():
            rank.close()


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number else "the ranks themselves"
