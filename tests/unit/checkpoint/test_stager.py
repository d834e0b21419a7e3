"""Weights that are written while they are being copied are no checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import CheckpointSaver, LiveState, SaveContent, SaveHandle
from hetero_fw.checkpoint.staging import StagingBuffer
from tests.unit.checkpoint.examples import WAIT_S, Events, Model, make_saver, published, trained

TOLD = "weights were changed outside of the optimizer's step while they were copied"


class HeldCopies:
    """Holds back what is copied beside training until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Event()
        real, trains = StagingBuffer.copy, threading.current_thread()

        def held(*args: object) -> None:
            if threading.current_thread() is not trains:
                assert self._gate.wait(WAIT_S)
            real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(StagingBuffer, "copy", held)

    def release(self) -> None:
        self._gate.set()


def begin(saver: CheckpointSaver, step: int, live: LiveState) -> SaveHandle:
    """Save as training does: what the optimizer alone changes may be copied beside it."""
    versions = live.versions()
    tensors, values = live.flatten()
    content = SaveContent(
        step=step,
        tensors=tensors,
        state=values,
        reason="test",
        may_be_infinite=live.buffers,
        is_unchanged=lambda: live.versions() == versions,
    )
    return saver.save_content(content, changing=live.changing)


def double(module: Model) -> None:
    with torch.no_grad():
        module.last.weight.mul_(2.0)


def zero_and_put_back(module: Model) -> None:
    """As an evaluation with other weights does; a copy may have met either."""
    with torch.no_grad():
        own = module.first.bias.clone()
        module.first.bias.zero_()
        module.first.bias.copy_(own)


def load(module: Model) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})


@pytest.mark.parametrize("write", [double, zero_and_put_back, load])
def test_a_write_while_weights_are_copied_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Model], None]
) -> None:
    held = HeldCopies(monkeypatch)
    events: Events = []
    saver = make_saver(tmp_path, events, overlaps_staging=True)
    module, optimizer = trained()
    live = LiveState(module, optimizer)
    handle = begin(saver, 1, live)
    write(module)
    held.release()
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert not handle.outcome.ok
    assert TOLD in handle.outcome.reason
    assert [event for event, _, _ in events] == ["checkpoint_started", "checkpoint_failed"]
    assert published(tmp_path) == []

    again = begin(saver, 1, live)
    assert again.wait(WAIT_S)
    assert again.outcome is not None
    assert again.outcome.ok, again.outcome.reason


def test_what_a_step_does_before_the_optimizer_is_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch)
    saver = make_saver(tmp_path, overlaps_staging=True)
    module, optimizer = trained()
    double(module)  # between two steps, before the save
    handle = begin(saver, 1, LiveState(module, optimizer))
    optimizer.zero_grad()
    module(torch.randn(6, 5)).square().mean().backward()
    held.release()
    saver.finish_staging()
    optimizer.step()
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.ok, handle.outcome.reason


def test_the_question_is_asked_when_the_last_copy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch)
    saver = make_saver(tmp_path, overlaps_staging=True)
    module, optimizer = trained()
    tensors, _ = LiveState(module, optimizer).flatten()
    asked: list[bool] = []
    content = SaveContent(
        step=1,
        tensors=tensors,
        state={},
        reason="test",
        may_be_infinite=set(tensors),
        is_unchanged=lambda: not asked.append(True),  # type: ignore[func-returns-value]
    )
    handle = saver.save_content(content)
    assert asked == []
    held.release()
    saver.finish_staging()
    assert asked == [True]
    assert handle.wait(WAIT_S)
