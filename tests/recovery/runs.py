"""What recovery tests ask of a finished run, and a run that nobody disturbed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.recovery.test_kill import TINY

# Half the devices of TINY: for what does not depend on how many ranks there are.
PAIR = (
    *TINY,
    "hardware.groups.a100.devices_per_node=1",
    "hardware.groups.v100.devices_per_node=1",
)
# Nothing is saved because of an exception: for what depends on the saves before it.
NO_LAST_SAVE = "callbacks.emergency_save.exception_grace_s=null"
FAULTY = "model.module._target_=tests.recovery.modules.FaultyGPT"


def faulty(**arguments: object) -> tuple[str, ...]:
    """Overrides that make the model a `FaultyGPT`."""
    return (FAULTY, *(f"+model.module.{name}={value}" for name, value in arguments.items()))


def undisturbed(root: Path, *overrides: str) -> Path:
    """Train to the end in `root/run` and return that directory."""
    command = [sys.executable, str(REPOSITORY / "train.py"), f"paths.root={root}", "run_name=run"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


def digest_of(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "DONE"
    return str(summary["weights_digest"])


def column(run_dir: Path, name: str) -> list[str]:
    """A column of `metrics.csv`, step after step; every step must be there once."""
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [row[name] for row in rows]
