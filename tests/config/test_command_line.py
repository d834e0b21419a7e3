"""train.py as users call it: help, errors, flags, sweeps and their directories."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
HEAVY = {"torch", "lightning", "lightning.pytorch"}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A finished call: what it printed, its processor time and the modules that it imported."""

    status: int
    output: str
    errors: str
    cpu_s: float
    imported: frozenset[str]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Call]:
    """Call train.py from an empty directory."""

    def call(*arguments: str) -> Call:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # -X importtime writes a line for every import to stderr.
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(TRAIN), *arguments],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = done.stderr.splitlines()
        imports = [line for line in lines if line.startswith("import time:")]
        return Call(
            status=done.returncode,
            output=done.stdout,
            errors="\n".join(line for line in lines if line not in imports),
            cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            imported=frozenset(line.rpartition("|")[2].strip() for line in imports),
        )

    return call


def assert_quick(call: Call) -> None:
    # Processor time, so that a busy machine does not matter.
    assert call.cpu_s < 2
    assert not call.imported & HEAVY


def test_help_is_one_screen_and_names_every_group(train: Callable[..., Call]) -> None:
    call = train("--help")
    assert call.status == 0
    assert_quick(call)
    lines = call.output.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 100
    for folder in (TRAIN.parent / "conf").iterdir():
        if folder.is_dir():
            options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            assert f"{folder.name}: {options}" in lines
            assert call.output.count(folder.name) >= 2, f"{folder.name} is explained"


def test_all_problems_at_once(train: Callable[..., Call], tmp_path: Path) -> None:
    call = train("hardware=a100_v100_mx", "trainer.max_step=3", "+typo=1")
    assert call.status == 2
    assert call.output == ""
    assert_quick(call)
    first, *rest = call.errors.splitlines()
    assert first == "hetero_fw: 3 problems in the configuration:"
    assert [line.split(":")[0] for line in rest] == [
        "  1. hardware=a100_v100_mx",
        "  2. trainer.max_step",
        "  3. typo",
    ]
    assert list(tmp_path.iterdir()) == []


def test_one_problem_is_one_line(train: Callable[..., Call]) -> None:
    call = train("ckpt=adaptiv")
    assert call.status == 2
    assert call.errors.startswith("hetero_fw: 1 problem in the configuration: ckpt=adaptiv: ")
    assert len(call.errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.paths=nowhere/*.txt"], "nowhere/*.txt"),
        (["run_name=new", "resume=must"], "resume=must"),
        (["hardware=a100_v100_mix", "hardware.emulate=never"], "hardware.emulate=never"),
        (["model.module.model_dim=100000", "model.module.num_layers=100"], "too little"),
    ],
)
def test_what_only_the_run_can_see(
    train: Callable[..., Call], tmp_path: Path, overrides: list[str], words: str
) -> None:
    call = train(*overrides)
    assert call.status == 2, call.errors
    assert call.errors.startswith("hetero_fw: ")
    assert words in call.errors
    assert "Traceback" not in call.errors
    assert not call.imported & HEAVY
    assert not list(tmp_path.glob("outputs/*/status.json"))


def test_unwritable_root(train: Callable[..., Call], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    call = train("paths.root=file/runs")
    assert call.status == 2
    assert "paths.root" in call.errors


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, str(TRAIN), "mode=plan"],
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "the working directory cannot be used" in done.stderr


def test_flags_of_hydra_keep_working(train: Callable[..., Call]) -> None:
    shown = train("--cfg", "job", "trainer.max_steps=abc")
    assert shown.status == 0
    assert "max_steps: abc" in shown.output
    assert train("--cfg", "job", "ckpt=adaptiv").status == 2
    assert "experiment: none" in train("--info", "defaults-tree").output
    assert train("--hydra-help").status == 0


def test_plan_mode_starts_nothing(train: Callable[..., Call], tmp_path: Path) -> None:
    call = train("mode=plan", "hardware=a100_v100_mix", "run_name=look")
    assert call.status == 0, call.errors
    assert not call.imported & HEAVY
    plan = json.loads((tmp_path / "outputs/look/plan.json").read_text())
    assert {rank["device"] for rank in plan["ranks"]} == {"a100-80gb", "v100-32gb"}
    assert not (tmp_path / "outputs/look/status.json").exists()


def test_options_of_the_user(train: Callable[..., Call], tmp_path: Path) -> None:
    folder = tmp_path / "lab" / "hardware"
    folder.mkdir(parents=True)
    (folder / "lab.yaml").write_text(
        "name: lab\ngroups:\n  x: {device: l4, devices_per_node: 2}\nintra_link: pcie4\n"
    )
    # num_nodes and memory_gib are known to the schema only.
    values = ["hardware.groups.x.num_nodes=2", "hardware.groups.x.memory_gib=12", "run_name=lab"]
    call = train("--config-dir", "lab", "hardware=lab", "mode=plan", *values)
    assert call.status == 0, call.errors
    plan = json.loads((tmp_path / "outputs/lab/plan.json").read_text())
    assert len(plan["ranks"]) == 4
    wrong = train(f"hydra.searchpath=[file://{tmp_path}/lab]", "hardware=labb", "mode=plan")
    assert "Did you mean 'lab'" in wrong.errors


def test_sweep(train: Callable[..., Call], tmp_path: Path) -> None:
    call = train("mode=plan", "-m", "seed=1,2", "trainer.max_steps=3")
    assert call.status == 0, call.errors
    assert "#0 : mode=plan seed=1" in call.output
    plans = sorted(tmp_path.glob("outputs/sweeps/*/*/plan.json"))
    assert [plan.parent.name for plan in plans] == ["0", "1"]
    seeds = [(plan.parent / ".hydra/config.yaml").read_text() for plan in plans]
    assert ["seed: 1\n" in seeds[0], "seed: 2\n" in seeds[1]] == [True, True]


def test_named_sweep_has_the_same_directories_again(
    train: Callable[..., Call], tmp_path: Path
) -> None:
    arguments = ["-m", "mode=plan", "hardware=a100_v100_mix", "hardware.groups.a100.mfu=0.2,0.4"]
    for _ in range(2):
        assert train(*arguments, "run_name=mine").status == 0
    folders = sorted(path.parent.relative_to(tmp_path) for path in tmp_path.rglob("plan.json"))
    assert folders == [Path("outputs/mine/0"), Path("outputs/mine/1")]


def test_every_run_of_a_sweep_is_checked_first(train: Callable[..., Call], tmp_path: Path) -> None:
    call = train("-m", "mode=plan", "seed=1,b", "ckpt=fixed,adaptve", "trainer.max_steps=1,0")
    assert call.status == 2
    for word in ("seed=b", "ckpt=adaptve", "trainer.max_steps=0"):
        assert call.errors.count(word) == 1
    assert list(tmp_path.iterdir()) == []
