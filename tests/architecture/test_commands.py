"""README, Makefile and .ci/run name the same commands."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e"
DEMO_COMMAND = f"{INSTALL} . && .venv/bin/python train.py hardware=a100_v100_mix ckpt=adaptive"
TEST_COMMAND = f"{INSTALL} '.[dev]' && .venv/bin/python -m pytest -n 2 --dist worksteal"


def command_lines(name: str) -> list[str]:
    return (REPOSITORY / name).read_text().splitlines()


def test_readme_has_the_two_commands() -> None:
    lines = command_lines("README.md")
    assert DEMO_COMMAND in lines
    assert TEST_COMMAND in lines


def test_ci_takes_the_test_command_from_the_readme() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    pattern = re.search(r"grep -m 1 -- '([^']+)' README\.md", script)
    assert pattern is not None
    first = next(line for line in command_lines("README.md") if pattern.group(1) in line)
    assert first == TEST_COMMAND
    subprocess.run(["bash", "-n", REPOSITORY / ".ci" / "run"], check=True, timeout=10)


def test_make_runs_the_same_tools() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    assert "$(BIN)/pip install -c constraints.txt -e '.[dev]'" in text
    for tool in ("ruff format --check", "ruff check", "mypy", "lint-imports", "python -m pytest"):
        assert f"$(BIN)/{tool}" in text


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["dev"] + extras["recipes"] + extras["tensorboard"]
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in required} - {"hetero-fw"}
    lines = command_lines("constraints.txt")
    pinned = {line.split("==")[0].replace("_", "-").lower() for line in lines}
    assert names <= pinned


def test_readme_lists_every_group_and_option() -> None:
    rows = [line.split("|") for line in command_lines("README.md") if line.startswith("| `")]
    listed = {row[1].strip(" `"): set(re.findall(r"`([^`]+)`", row[2])) for row in rows}
    conf = REPOSITORY / "conf"
    groups = {path.name for path in conf.iterdir() if path.is_dir()}
    for group in groups:
        assert listed[group] == {path.stem for path in (conf / group).glob("*.yaml")}, group


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_readme_tells_the_real_defaults() -> None:
    conf = REPOSITORY / "conf"
    main = read_yaml(conf / "train.yaml")
    options = {k: v for entry in main["defaults"] if entry != "_self_" for k, v in entry.items()}
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| `([^`]+)` \|", "\n".join(command_lines("README.md")), re.M
    )
    told = {key: value for key, value in rows if key not in options}
    assert len(told) > 8
    for key, value in told.items():
        group, _, name = key.rpartition(".")
        values = main
        if group:
            values = read_yaml(conf / group / f"{options[group]}.yaml")
            if "defaults" in values:
                values = read_yaml(conf / group / f"{values['defaults'][0]}.yaml") | values
        assert str(values[name]) == value, key
