"""How the tree looks: sizes, names, thin hooks, and nothing that belongs to one machine."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    ".ci", ".git", ".gitignore", ".pre-commit-config.yaml", "LICENSE", "Makefile", "README.md",
    "conf", "constraints.txt", "hetero_fw", "plugins", "pyproject.toml", "recipes", "tests",
    "train.py",
}  # fmt: skip
PURE = {"hardware", "launch", "planning", "policies", "simulate"}
ACTING = {
    "app", "callbacks", "checkpoint", "cli", "data", "monitoring", "parallel", "profiling",
    "recovery", "strategies",
}  # fmt: skip
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_HOOK_LINES = 15
FORBIDDEN_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
FORBIDDEN_SUFFIXES = ("Engine", "Handler", "Helper", "Manager", "Utils")
# Spelt in two parts, so that this file does not find itself.
MACHINE_PATHS = ("/wo" + "rk/", "/tmp" + "/w/", "/ro" + "ot/", "/ho" + "me/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tracked_files() -> list[Path]:
    """Files of the repository: what git knows or would add; without git, what is not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        names = [name for name in listing.stdout.split("\0") if name]
        return [path for name in names if (path := REPOSITORY / name).is_file()]
    files = (path for path in REPOSITORY.rglob("*") if path.is_file())
    return [p for p in files if not any(map(_is_leftover, p.relative_to(REPOSITORY).parts))]


def _is_leftover(name: str) -> bool:
    """Whether .gitignore has it: caches and what runs write."""
    is_hidden = name.startswith(".") and name not in TOP_LEVEL
    return is_hidden or name in {".git", "__pycache__", "outputs"} or name.endswith(".egg-info")


def product_files() -> list[Path]:
    """Python files of the product, tests left out."""
    roots = ("hetero_fw", "plugins", "recipes")
    files = [path for root in roots for path in sorted((REPOSITORY / root).rglob("*.py"))]
    return [*files, REPOSITORY / "train.py"]


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def body_lines(function: Function) -> int:
    """Lines of the body without the docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body and body[-1].end_lineno else 0


def test_files_are_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in product_files()}
    long = {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long


def test_functions_are_small() -> None:
    long = [
        f"{path}:{function.lineno} {function.name} has {body_lines(function)} lines"
        for path in product_files()
        for function in functions(path)
        if body_lines(function) > MAX_FUNCTION_LINES
    ]
    assert not long


def test_callback_hooks_are_thin() -> None:
    long = [
        f"{path}:{hook.lineno} {hook.name} has {body_lines(hook)} lines"
        for path in sorted((REPOSITORY / "hetero_fw" / "callbacks").glob("*.py"))
        for hook in functions(path)
        if hook.name.startswith(("on_", "setup", "teardown")) and body_lines(hook) > MAX_HOOK_LINES
    ]
    assert not long


def test_names_say_what_a_thing_is() -> None:
    vague_files = [str(path) for path in product_files() if path.stem in FORBIDDEN_NAMES]
    vague_classes = [
        f"{path}:{node.lineno} {node.name}"
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith(FORBIDDEN_SUFFIXES)
    ]
    assert not vague_files + vague_classes


def packages() -> set[str]:
    return {path.parent.name for path in (REPOSITORY / "hetero_fw").glob("*/__init__.py")}


def contract(name: str) -> dict[str, Any]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    found: dict[str, Any] = next(c for c in settings["contracts"] if c["id"] == name)
    return found


def test_every_package_has_a_layer() -> None:
    placed = {name.strip(" ()") for row in contract("layers")["layers"] for name in row.split("|")}
    assert packages() <= placed


@pytest.mark.parametrize(
    ("contract_name", "free"),
    [
        ("pure", ACTING),
        ("hydra", PURE | {"app", "cli"}),
        ("lightning", PURE | {"app", "callbacks", "cli", "strategies"}),
    ],
)
def test_contracts_cover_every_package(contract_name: str, free: set[str]) -> None:
    sources = {
        name.removeprefix("hetero_fw.") for name in contract(contract_name)["source_modules"]
    }
    assert packages() - free <= sources


def test_packages_export_their_names() -> None:
    texts = {name: (REPOSITORY / "hetero_fw" / name / "__init__.py") for name in packages()}
    assert not [name for name, path in texts.items() if "__all__" not in path.read_text()]


def test_top_level_holds_nothing_else() -> None:
    top = {path.relative_to(REPOSITORY).parts[0] for path in tracked_files()}
    assert top <= TOP_LEVEL


def test_no_machine_path_in_the_tree() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path}: {word}" for word in MACHINE_PATHS if word in text]
    assert not found


@pytest.mark.parametrize("marker", ["TODO", "FIXME", "NotImplementedError"])
def test_nothing_is_left_for_later(marker: str) -> None:
    assert not [str(path) for path in product_files() if marker in path.read_text()]
