"""Targets are judged by their source; nothing of theirs is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetero_fw.app.targets import accepted_arguments, argument_problems, target_problem


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package on the search path whose modules fail when they are imported."""
    root = tmp_path_factory.mktemp("sources")
    folder = root / "some_nets"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from .big import Big as Huge\nfrom some_nets.small import small, Kw, Decorated, Data\n"
        "boom = 1 / 0\n"
    )
    (folder / "big.py").write_text(
        "class Big:\n    def __init__(self, width, *, depth=1):\n        pass\n"
    )
    (folder / "small.py").write_text(
        "import dataclasses\n"
        "try:\n    import fast\nexcept ImportError:\n    def small(a, /, b=1): pass\n"
        "class Kw:\n    def __init__(self, **options): pass\n"
        "@dataclasses.dataclass\nclass Data:\n    a: int\n"
        "class Plain(Kw): pass\n"
        "@dataclasses.dataclass\nclass Decorated:\n    def __init__(self, x): pass\n"
    )
    (folder / "lazy.py").write_text(
        "__all__ = ['Late']\ndef __getattr__(name):\n    raise AttributeError(name)\n"
    )
    (folder / "dynamic.py").write_text("from math import *\n")
    sys.path.insert(0, str(root))
    yield folder
    sys.path.remove(str(root))
    assert "some_nets" not in sys.modules


@pytest.mark.parametrize(
    "target",
    [
        "some_nets.Huge",
        "some_nets.big.Big",
        "some_nets.small.small",
        "some_nets.small",  # the function of that name, which hides the module
        "some_nets.big.Big.from_file",
        "some_nets.lazy.Late",
        "some_nets.dynamic.anything",
        "builtins.set",
        "math.sqrt",
        "collections.OrderedDict",
        "torch.optim.AdamW",
    ],
)
def test_good_targets(target: str) -> None:
    assert target_problem(target) is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("some_nets.Hug", "some_nets has no 'Hug'. Did you mean 'Huge'?"),
        ("some_nets.bigg.Big", "some_nets has no 'bigg'. Did you mean 'big'?"),
        ("some_nets.big", "is a module. Name a class"),
        ("some_nets.lazy.Lat", "Did you mean 'Late'?"),
        ("nowhere_at_all.Net", "no package 'nowhere_at_all' is installed."),
        ("Net", "dotted path"),
        ("", "dotted path"),
        (3, "dotted path"),
    ],
)
def test_bad_targets(target: object, words: str) -> None:
    assert words in (target_problem(target) or "")


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("some_nets.Huge", ["width", "depth"]),
        ("some_nets.small", ["a", "b"]),
        ("some_nets.Kw", None),
        ("some_nets.Data", None),
        ("some_nets.small.Plain", None),
        ("some_nets.Decorated", None),
        ("some_nets.lazy.Late", None),
        ("some_nets.nothing", None),
        ("math.sqrt", None),
    ],
)
def test_arguments_are_read_through_reexports(target: str, arguments: list[str] | None) -> None:
    assert accepted_arguments(target) == arguments


def test_unknown_arguments_are_told_with_the_known_ones() -> None:
    problems = argument_problems("some_nets.Huge", ["width", "dept"])
    assert problems == {
        "dept": "some_nets.Huge takes no such argument. Did you mean 'depth'? "
        "It takes: width, depth."
    }


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from hetero_fw.app.targets import *; "
        "assert target_problem('torch.optim.AdamW') is None; "
        "assert 'lr' in accepted_arguments('torch.optim.AdamW'); "
        "assert target_problem('recipes.gpt.GPTModule') is None; "
        "assert not {'torch', 'recipes'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60
    )
