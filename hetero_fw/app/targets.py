"""Whether a `_target_` exists and takes its arguments, found out without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from hetero_fw.app.sources import Source, locate
from hetero_fw.errors import did_you_mean

# Definitions are followed through this many re-exports.
_MAX_REEXPORTS = 6


def target_problem(target: object) -> str | None:
    """Say what is wrong with a `_target_`, or return None if it seems to be importable.

    Where a module makes its names while it is imported (star imports, `__getattr__`, compiled code)
    every name is taken to exist: `instantiate` has the last word.
    """
    if not isinstance(target, str) or "." not in target.strip("."):
        return "must be the dotted path of a class or function, like torch.optim.AdamW."
    source, names = locate(target)
    if source is None:
        return f"no package {names[0]!r} is installed."
    if not names:
        return f"{target} is a module. Name a class or function in it."
    if source.names is None or names[0] in source.names:
        return None
    hint = did_you_mean(names[0], source.names) or did_you_mean(names[0], source.submodules())
    return f"{source.name} has no {names[0]!r}.{hint}"


def argument_problems(target: str, arguments: Iterable[str]) -> dict[str, str]:
    """Arguments that a target does not take, each with what is wrong.

    Empty where that cannot be seen in the source: `**kwargs`, decorators, compiled code.
    """
    accepted = accepted_arguments(target)
    if accepted is None:
        return {}
    return {
        name: f"{target} takes no such argument.{did_you_mean(name, accepted)} "
        f"It takes: {', '.join(accepted)}."
        for name in arguments
        if name not in accepted
    }


def accepted_arguments(target: str) -> list[str] | None:
    """Names of the arguments that a class or function takes; None if its source does not say."""
    for _ in range(_MAX_REEXPORTS):
        source, names = locate(target)
        node = source.definition(names[0]) if source is not None and len(names) == 1 else None
        if not isinstance(node, ast.ImportFrom):
            return _arguments(node)
        target = _origin(source, node, names[0])
    return None


def _origin(source: Source | None, node: ast.ImportFrom, name: str) -> str:
    original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
    return f"{source.absolute(node)}.{original}" if source is not None else original


def _arguments(node: ast.AST | None) -> list[str] | None:
    if isinstance(node, ast.ClassDef):
        is_plain = not node.decorator_list and not node.keywords
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        if not is_plain or "__new__" in methods or "__init__" not in methods:
            return None
        names = _arguments(methods["__init__"])
        return names[1:] if names is not None else None
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    given = node.args
    if given.kwarg is not None:
        return None
    return [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
