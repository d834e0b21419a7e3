"""What the supervisor tells a rank survives the one line of text it is told in."""

from __future__ import annotations

from pathlib import Path

from hetero_fw.app.job import RankJob
from hetero_fw.recovery import StoreAddress


def test_round_trip() -> None:
    job = RankJob(
        run_path=Path("/runs/with space/ü:1"),
        attempt=3,
        store=StoreAddress(host="127.0.0.1", port=4711),
        num_threads=2,
        stop_signals=("SIGTERM",),
        save_signals=(),
    )
    text = job.to_text()
    assert "\n" not in text
    assert RankJob.from_text(text) == job
