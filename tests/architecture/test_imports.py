"""The import contract of pyproject.toml holds, and it bites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("hetero_fw", "recipes")
HEAVY = ("torch", "lightning", "hydra", "omegaconf", "numpy", "scipy", "wandb")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages that lie under `root`."""
    program = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def test_contract_is_kept() -> None:
    result = lint_imports(REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr


# One module that breaks the contract each; import-linter reports all of them in one run.
TRESPASSES = {
    "callbacks": "import recipes",
    "data": "from hetero_fw.checkpoint import anything",
    "hardware": "import torch",
    "monitoring": "from hetero_fw.app import anything",
    "planning": "import time",
    "policies": "from hetero_fw.planning import anything",
    "profiling": "import lightning.pytorch",
    "recovery": "from hetero_fw import strategies",
    "strategies": "from omegaconf import OmegaConf",
}


def test_every_violation_is_reported(copy: Path) -> None:
    for package, statement in TRESPASSES.items():
        (copy / "hetero_fw" / package / "trespass.py").write_text(f"{statement}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    reported = {name for name in TRESPASSES if f"hetero_fw.{name}.trespass" in result.stdout}
    assert reported == set(TRESPASSES), result.stdout


def test_package_without_a_layer_is_reported(copy: Path) -> None:
    (copy / "hetero_fw" / "extras").mkdir()
    (copy / "hetero_fw" / "extras" / "__init__.py").touch()
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "hetero_fw.extras" in result.stdout


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("hetero_fw", HEAVY),
        ("hetero_fw.hardware", HEAVY),
        ("hetero_fw.policies", HEAVY),
        ("hetero_fw.planning", ("torch", "lightning", "hydra", "omegaconf", "wandb")),
    ],
)
def test_import_stays_light(module: str, unwanted: tuple[str, ...]) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(json.loads(result.stdout)).isdisjoint(unwanted)
