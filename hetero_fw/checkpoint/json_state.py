"""State of optimizers, schedulers, callbacks and modules as JSON values, and back.

A value that JSON has no form of is an object with a key such as `__tuple__`. What is read makes
values of the types below and nothing else: no class or function is looked up by a name in a file.
"""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor

from hetero_fw.checkpoint.json_numbers import read_array, read_tensor, write_array, write_tensor

_TENSOR = "__tensor__"
_TAKEN = "__taken__"  # a tensor that is kept elsewhere, by its name there
_ARRAY = "__array__"
_SCALAR = "__scalar__"
_ITEMS = "__items__"
_COUNTER = "__counter__"
_ORDERED = "__ordered__"
_DEFAULT = "__default__"
_DEQUE = "__deque__"
_TUPLE = "__tuple__"
_SET = "__set__"
_FROZENSET = "__frozenset__"

_MAX_DEPTH = 100
_MAX_INT_BITS = 2000  # Python reads no longer ones from decimal digits
_TAG_OF_ITEMS = {tuple: _TUPLE, deque: _DEQUE, set: _SET, frozenset: _FROZENSET}
_TAG_OF_DICT = {Counter: _COUNTER, OrderedDict: _ORDERED, defaultdict: _DEFAULT}
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple, Counter, deque)
}


@dataclass(frozen=True)
class _Form:
    """How values of one type, and not of its subclasses, are written and read."""

    type: type
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_FORMS = {
    "__bytes__": _Form(bytes, bytes.hex, bytes.fromhex),
    "__bytearray__": _Form(bytearray, bytearray.hex, bytearray.fromhex),
    "__int__": _Form(int, hex, lambda text: int(text, 16)),
    "__complex__": _Form(complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "__range__": _Form(range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "__timedelta__": _Form(
        datetime.timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "__datetime__": _Form(
        datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat
    ),
    "__date__": _Form(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "__time__": _Form(datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "__decimal__": _Form(Decimal, str, Decimal),
    "__fraction__": _Form(Fraction, str, Fraction),
    "__uuid__": _Form(UUID, str, UUID),
    "__path__": _Form(type(pathlib.Path()), str, pathlib.Path),
    "__posix_path__": _Form(pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    "__windows_path__": _Form(pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    "__size__": _Form(torch.Size, list, torch.Size),
    "__device__": _Form(torch.device, str, torch.device),
}
_TAG_OF_FORM = {form.type: tag for tag, form in _FORMS.items()}


def to_plain(
    value: Any,
    on_lost: Callable[[str], None] | None = None,
    path: str = "",
    *,
    on_missing: Callable[[str], None] | None = None,
    take: Callable[[Tensor, str], str] | None = None,
) -> Any:
    """JSON-able copy of nested containers, numbers, strings, bytes, small tensors and arrays.

    What has no such form is None in it. Instances of a subclass become what they derive from: a
    named tuple a tuple, a member of an `IntEnum` an int. Of a time zone the offset is kept.

    Args:
        value: what is kept.
        on_lost: told where something is lost, and of what type it was.
        path: where `value` is, for that.
        on_missing: told instead where nothing is kept, rather than a value of another type.
        take: keeps tensors that are dense and not empty; gets each with its path, returns its name.
    """
    on_lost = on_lost or _say_nothing
    return _Writer(on_lost, on_missing or on_lost, take).write(value, path)


def from_plain(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Inverse of `to_plain`. Tuples that an older release wrote come back as lists.

    Args:
        tensors: that `take` kept, by their names.
    """
    if tensors is not None:
        value = _put(value, tensors)
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key in _READERS), None)
    if tag is None:
        return {key: from_plain(item) for key, item in value.items()}
    return _READERS[tag](value)


def taken(value: Any) -> Iterator[tuple[str, bool]]:
    """The name of each tensor that `take` kept for `to_plain`, and whether it was on the host."""
    if isinstance(value, dict) and _TAKEN in value:
        yield value[_TAKEN], value["is_on_host"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from taken(item)


def _put(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TAKEN in value:
            return tensors[value[_TAKEN]]
        return {key: _put(item, tensors) for key, item in value.items()}
    return [_put(item, tensors) for item in value] if isinstance(value, list) else value


class _Writer:
    """Writes one value, and knows what it is inside of."""

    def __init__(
        self,
        on_lost: Callable[[str], None],
        on_missing: Callable[[str], None],
        take: Callable[[Tensor, str], str] | None,
    ) -> None:
        self._on_lost = on_lost
        self._on_missing = on_missing
        self._take = take
        self._open: list[int] = []  # containers around the current value, by id

    def write(self, value: Any, path: str) -> Any:
        try:
            return self._write(value, path)
        except Exception as error:  # noqa: BLE001  # whatever a user's type raises, no save fails
            return self._lose(path, f"{type(value).__name__}: {error}")

    def _write(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._write_tensor(value, path)
        if isinstance(value, np.ndarray):
            written = write_array(value, _ARRAY)
            self._kind(value, (np.ndarray,), path)
            return written
        if isinstance(value, np.generic):
            return write_array(np.asarray(value), _SCALAR)
        is_short = type(value) is int and value.bit_length() <= _MAX_INT_BITS
        if type(value) in _TAG_OF_FORM and not is_short:
            tag = _TAG_OF_FORM[type(value)]
            return {tag: _FORMS[tag].write(value)}
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            return self._write_container(value, path)
        if isinstance(value, bool | int | float | str):
            self._kind(value, (bool, int, float, str), path)
            return value
        return None if value is None else self._lose(path, type(value).__name__)

    def _write_tensor(self, value: Tensor, path: str) -> Any:
        if self._take is not None and is_dense(value) and value.numel():
            return {_TAKEN: self._take(value, path), "is_on_host": value.device.type == "cpu"}
        written = write_tensor(value, _TENSOR)
        self._kind(value, (Tensor,), path)
        return written

    def _lose(self, path: str, what: str) -> None:
        self._on_missing(f"{path} ({what})")

    def _write_container(self, value: Any, path: str) -> Any:
        if id(value) in self._open or len(self._open) == _MAX_DEPTH:
            return self._lose(path, f"{type(value).__name__} inside of itself, or too deep")
        self._open.append(id(value))
        try:
            if isinstance(value, dict):
                return self._write_dict(value, path)
            return self._write_items(value, path)
        finally:
            self._open.pop()

    def _write_items(self, value: Any, path: str) -> Any:
        kind = self._kind(value, (list, *_TAG_OF_ITEMS), path)
        items = [self.write(item, _join(path, index)) for index, item in enumerate(value)]
        if kind is list:
            return items
        limits = {"maxlen": value.maxlen} if kind is deque else {}
        return {_TAG_OF_ITEMS[kind]: items, **limits}

    def _write_dict(self, value: dict[Any, Any], path: str) -> Any:
        kind = self._kind(value, (*_TAG_OF_DICT, dict), path)
        factory = getattr(value, "default_factory", None) if kind is defaultdict else None
        if factory is not None and factory not in _FACTORIES.values():
            self._lose(_join(path, "default_factory"), type(factory).__name__)
            kind = dict
        # JSON would make text of other keys, and MultiStepLR no longer find its milestones.
        is_json = all(isinstance(key, str) and key not in _READERS for key in value)
        if kind is dict and is_json:
            return {key: self.write(item, _join(path, key)) for key, item in value.items()}
        pairs = [
            [self.write(key, _join(path, key)), self.write(item, _join(path, key))]
            for key, item in value.items()
        ]
        made_by = {"factory": factory and factory.__name__} if kind is defaultdict else {}
        return {_TAG_OF_DICT.get(kind, _ITEMS): pairs, **made_by}

    def _kind(self, value: Any, kinds: tuple[type, ...], path: str) -> Any:
        """Which of `kinds` it is an instance of; says so if it is of a subclass."""
        kind = next(kind for kind in kinds if isinstance(value, kind))
        if type(value) is not kind:
            self._on_lost(f"{path} as {type(value).__name__} but as {kind.__name__}")
        return kind


def is_dense(value: Tensor) -> bool:
    """Whether its elements are all there is to it."""
    return value.layout is torch.strided and not value.is_quantized


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _say_nothing(what: str) -> None:
    """Stands in where nobody is told what is lost."""


def _hashable(key: Any) -> Any:
    """Of an element that an older release has written as a list."""
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def _elements(items: list[Any]) -> list[Any]:
    return [_hashable(from_plain(item)) for item in items]


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
    return {_hashable(from_plain(key)): from_plain(item) for key, item in pairs}


def _read_default(value: dict[str, Any]) -> defaultdict[Any, Any]:
    factory = value["factory"]
    return defaultdict(None if factory is None else _FACTORIES[factory], _pairs(value[_DEFAULT]))


def _read_taken(value: dict[str, Any]) -> Any:
    raise KeyError(f"the tensor {value[_TAKEN]} is kept elsewhere")


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    _TAKEN: _read_taken,
    _TENSOR: lambda value: read_tensor(value, _TENSOR),
    _ARRAY: lambda value: read_array(value, _ARRAY),
    _SCALAR: lambda value: read_array(value, _SCALAR)[()],
    _ITEMS: lambda value: _pairs(value[_ITEMS]),
    _COUNTER: lambda value: Counter(_pairs(value[_COUNTER])),
    _ORDERED: lambda value: OrderedDict(_pairs(value[_ORDERED])),
    _DEFAULT: _read_default,
    _DEQUE: lambda value: deque(map(from_plain, value[_DEQUE]), value["maxlen"]),
    _TUPLE: lambda value: tuple(map(from_plain, value[_TUPLE])),
    _SET: lambda value: set(_elements(value[_SET])),
    _FROZENSET: lambda value: frozenset(_elements(value[_FROZENSET])),
}


def _reader(tag: str, form: _Form) -> Callable[[dict[str, Any]], Any]:
    return lambda value: form.read(value[tag])


_READERS |= {tag: _reader(tag, form) for tag, form in _FORMS.items()}
