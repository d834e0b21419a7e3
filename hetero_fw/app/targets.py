"""Whether a `_target_` exists, found out by reading source files: nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from hetero_fw.errors import did_you_mean


def target_problem(target: object) -> str | None:
    """Say what is wrong with a `_target_`, or return None if it seems to be importable.

    Where a module makes its names while it is imported (star imports, `__getattr__`, compiled code)
    every name is taken to exist: `instantiate` has the last word.
    """
    if not isinstance(target, str) or "." not in target.strip("."):
        return "must be the dotted path of a class or function, like torch.optim.AdamW"
    parts = target.split(".")
    if parts[0] in sys.builtin_module_names or parts[0] == "__main__":
        return None
    source = _find(parts[0], None)
    if source is None:
        return f"no package {parts[0]!r} is installed"
    for index, name in enumerate(parts[1:], start=1):
        inner = _find(name, source.search_path) if source.search_path else None
        if inner is None or (name == parts[-1] and source.surely_defines(name)):
            return None if source.defines(name) else source.lacks(".".join(parts[:index]), name)
        source = inner
    return f"{target} is a module; name a class or function in it"


class _Source:
    """The source of one module: where its submodules are and which names it defines."""

    def __init__(self, origin: str | None, search_path: list[str] | None) -> None:
        self.search_path = search_path
        self._names = _top_level_names(origin) if origin else frozenset()

    def defines(self, name: str) -> bool:
        return self._names is None or name in self._names

    def surely_defines(self, name: str) -> bool:
        return self._names is not None and name in self._names

    def lacks(self, module: str, name: str) -> str:
        submodules = (
            path.stem
            for folder in self.search_path or ()
            for path in Path(folder).glob("[!_]*")
            if path.is_dir() or path.suffix == ".py"
        )
        hint = did_you_mean(name, self._names or ()) or did_you_mean(name, submodules)
        return f"{module} has no {name!r}.{hint}"


def _find(name: str, search_path: list[str] | None) -> _Source | None:
    if search_path is None:
        # Knows editable installs as well, and imports nothing for a name without dots.
        spec = importlib.util.find_spec(name)
    else:
        spec = PathFinder.find_spec(name, search_path)
    if spec is None:
        return None
    locations = spec.submodule_search_locations
    return _Source(spec.origin, list(locations) if locations is not None else None)


@cache
def _top_level_names(origin: str) -> frozenset[str] | None:
    """Public and private names that a source file binds at its top level; None if not knowable."""
    path = Path(origin)
    if path.suffix != ".py":
        return None
    names = frozenset(_bound_names(ast.parse(path.read_bytes()).body))
    return None if names & {"*", "__getattr__"} else names


def _bound_names(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                yield from _stored_names(node)
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                yield from _bound_names(ast.iter_child_nodes(node))


def _stored_names(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
