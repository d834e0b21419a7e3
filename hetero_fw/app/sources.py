"""Python modules read as source text: where they are and which names they bind. Imports nothing."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom


@dataclass(frozen=True)
class Source:
    """One module.

    Attributes:
        name: dotted name.
        origin: its file, None for a namespace package and for built-in modules.
        search_path: folders of its submodules, None if it is no package.
    """

    name: str
    origin: Path | None
    search_path: tuple[str, ...] | None

    @cached_property
    def names(self) -> frozenset[str] | None:
        """Names bound at the top level; None if they are made while the module is imported."""
        if self.origin is None:
            return frozenset() if self.search_path is not None else None
        tree = self.tree
        if tree is None:
            return None
        names = frozenset(name for name, _ in _bindings(tree.body))
        if "*" in names:
            return None
        if "__getattr__" in names:
            # Lazy imports: what can be imported is what a literal `__all__` lists.
            exported = _literal_all(tree)
            return names | exported if exported is not None else None
        return names

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed source, None if there is none to read."""
        if self.origin is None or self.origin.suffix != ".py":
            return None
        return ast.parse(self.origin.read_text(encoding="utf-8"))

    def definition(self, name: str) -> Definition | None:
        """The last statement that defines or imports `name`, None if that is not visible."""
        found = None
        for bound, node in _bindings(self.tree.body if self.tree is not None else ()):
            if bound == name:
                found = node
        return found if isinstance(found, Definition) else None

    def absolute(self, imported: ast.ImportFrom) -> str:
        """The dotted name of the module that an import statement in this module names."""
        if imported.level == 0:
            return imported.module or ""
        package = self.name.split(".")
        num_dropped = imported.level - (1 if self.search_path is not None else 0)
        kept = package[: len(package) - num_dropped]
        return ".".join([*kept, *filter(None, [imported.module])])

    def submodules(self) -> Iterator[str]:
        """Names of the modules inside this package."""
        for folder in self.search_path or ():
            for path in Path(folder).glob("[!_]*"):
                if path.is_dir() or path.suffix == ".py":
                    yield path.stem


@cache
def locate(target: str) -> tuple[Source | None, tuple[str, ...]]:
    """Split a dotted path into the deepest module on it and the names to look up in that module.

    Where a package binds a name that is also a submodule's, the package's own name wins.
    """
    parts = target.split(".")
    source = _find(parts[0], None)
    for index, name in enumerate(parts[1:], start=1):
        if source is None:
            return None, tuple(parts)
        is_last = index == len(parts) - 1
        is_bound = is_last and source.names is not None and name in source.names
        inner = None if is_bound else _find(name, source)
        if inner is None:
            return source, tuple(parts[index:])
        source = inner
    return source, ()


def _find(name: str, package: Source | None) -> Source | None:
    if package is None:
        if name in sys.builtin_module_names:
            return Source(name, None, None)
        # Knows editable installs as well, and imports nothing for a name without dots.
        return _source(name, importlib.util.find_spec(name))
    if package.search_path is None:
        return None
    return _source(f"{package.name}.{name}", PathFinder.find_spec(name, package.search_path))


def _source(name: str, spec: ModuleSpec | None) -> Source | None:
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    return Source(
        name,
        Path(spec.origin) if spec.has_location and spec.origin is not None else None,
        tuple(folders) if folders is not None else None,
    )


def _bindings(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind, conditional ones included, and the statement."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], node
            case ast.Assign() | ast.AnnAssign():
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        yield inner.id, node
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                yield from _bindings(ast.iter_child_nodes(node))


def _literal_all(tree: ast.Module) -> frozenset[str] | None:
    """What `__all__` lists, None if anything but one literal makes it."""
    mentions = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "__all__"]
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0] in mentions
    ]
    if len(mentions) != 1 or len(values) != 1:
        return None
    try:
        return frozenset(ast.literal_eval(values[0]))
    except ValueError:
        return None
