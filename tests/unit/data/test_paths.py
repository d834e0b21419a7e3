from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_fw.data import check_paths
from hetero_fw.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md", ".hidden/e.txt", "sub/.f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("b.txt", ["b.txt"]),
        (["b.txt", "a.txt", "*.txt"], ["a.txt", "b.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]),
        (".", ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]),
        ("s*", ["sub/c.txt", "sub/d.md"]),
        (["sub", "a.txt"], ["a.txt", "sub/c.txt", "sub/d.md"]),
        ("sub/.f.txt", ["sub/.f.txt"]),
    ],
)
def test_files_are_found_in_order(
    corpus: Path, paths: str | list[str], expected: list[str]
) -> None:
    assert check_paths(paths) == tuple(corpus / name for name in expected)


def test_a_name_that_looks_like_a_glob(corpus: Path) -> None:
    (corpus / "x[1].txt").write_text("x")
    assert check_paths("x[1].txt") == (corpus / "x[1].txt",)


def test_special_files_are_left_out(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe.txt")
    (corpus / "broken.txt").symlink_to("nowhere")
    assert check_paths("*.txt") == (corpus / "a.txt", corpus / "b.txt")


def test_every_entry_that_matches_nothing_is_named(corpus: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_paths(["a.txt", "none.txt", "empty/**"])
    assert len(error.value.problems) == 2
    assert all(problem.startswith("data.paths: ") for problem in error.value.problems)
    assert "none.txt" in error.value.problems[0]
    assert "empty/**" in error.value.problems[1]
    with pytest.raises(ConfigError, match=r"data\.paths=\[\]"):
        check_paths([])


def test_short_text_is_refused(corpus: Path) -> None:
    assert len(check_paths(["a.txt", "b.txt"], min_bytes=10)) == 2
    with pytest.raises(ConfigError, match=r"data\.paths=\[a.txt, b.txt\]: .* 10 bytes, 11 or more"):
        check_paths(["a.txt", "b.txt"], min_bytes=11)
    (corpus / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"data\.paths=empty.txt: the text has 0 bytes"):
        check_paths("empty.txt")


def test_unreadable_files_are_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by chmod: root may read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "a.txt")
    with pytest.raises(ConfigError, match=r"data\.paths: no permission to read .*a\.txt"):
        check_paths("*.txt")


def test_standard_library() -> None:
    files = check_paths(None)
    assert list(files) == sorted(files)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert not any({"site-packages", "test", "tests"} & set(file.parts) for file in files)


def test_needs_no_torch() -> None:
    code = (
        "import sys; from hetero_fw.data import check_paths; import recipes.gpt, recipes.digits;"
        "check_paths(None);"
        "recipes.gpt.gpt_workload(vocab_size=8, sequence_length=8, num_layers=1, num_heads=1,"
        " model_dim=8); recipes.digits.digits_workload();"
        "assert not {'torch', 'numpy', 'sklearn', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_names_are_refused() -> None:
    import hetero_fw.data

    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = hetero_fw.data.Missing
    assert all(hasattr(hetero_fw.data, name) for name in hetero_fw.data.__all__)
