"""The save after an exception, while the device hangs in what came after the last step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import (
    JustInTimeSave,
    Metric,
    SaveContent,
    SaveOutcome,
    StandingStep,
    read_manifest,
)
from hetero_fw.policies import Tier
from tests.unit.checkpoint.examples import WAIT_S, make_saver, weights

pytestmark = pytest.mark.gpu

STEP = 3
# Of a kernel that only waits, as a collective does whose peer is gone: some 2 s.
HANG_CYCLES = 4 * 10**9


def test_what_it_reads_from_the_device_waits_for_the_finished_step_alone(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, overlaps_staging=True)
    tensors = {fqn: tensor.cuda() for fqn, tensor in weights(STEP).items()}
    saver.prepare(tensors)
    logged = torch.tensor(0.5, device="cuda")
    mark = torch.cuda.current_stream().record_event()
    torch.cuda._sleep(HANG_CYCLES)
    has_ended = torch.cuda.current_stream().record_event()
    was_beside: list[bool] = []

    def content(reason: str) -> SaveContent:
        metric = Metric(name="loss", value=float(logged))
        was_beside.append(not has_ended.query())
        return SaveContent(step=STEP, tensors=tensors, state={}, reason=reason, metric=metric)

    part = JustInTimeSave(saver, None, rank=0, world_size=1)
    part.stand(StandingStep(step=STEP, content=content, mark=mark))
    part.start()
    outcome = part.ask("raised", [Tier.STORAGE], WAIT_S)
    assert was_beside == [True], "the metric was read after a kernel that came after its mark"
    assert isinstance(outcome, SaveOutcome), outcome
    assert outcome.ok, outcome.reason
    assert isinstance(outcome.path, Path)
    assert read_manifest(outcome.path).metric == Metric(name="loss", value=0.5)
    torch.cuda.synchronize()
    assert saver.close(WAIT_S)
