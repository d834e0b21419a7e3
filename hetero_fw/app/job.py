"""What the supervisor tells a rank, in one line of text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_fw.recovery import StoreAddress


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Where a rank finds its run.

    Attributes:
        num_threads: CPU threads that this rank may use.
        stop_signals: names of the signals that end training; `save_signals`: of those that save.
    """

    run_path: Path
    attempt: int
    store: StoreAddress
    num_threads: int
    stop_signals: tuple[str, ...]
    save_signals: tuple[str, ...]

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "run_path": str(self.run_path)})

    @classmethod
    def from_text(cls, text: str) -> RankJob:
        data = json.loads(text)
        return cls(
            run_path=Path(data["run_path"]),
            attempt=data["attempt"],
            store=StoreAddress(**data["store"]),
            num_threads=data["num_threads"],
            stop_signals=tuple(data["stop_signals"]),
            save_signals=tuple(data["save_signals"]),
        )
