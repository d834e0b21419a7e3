"""State that is not tensors goes through JSON and comes back."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from hetero_fw.app.optimizer_settings import Changes, OptimizerSettings
from hetero_fw.app.state import Monitored
from hetero_fw.checkpoint import Metric, from_plain, to_plain

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 6]),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.MultiStepLR(o, milestones=[2, 4])],
        milestones=[3],
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
}


def through_json(value: Any, on_lost: Callable[[str], None] | None = None) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value, on_lost))))


def make(name: str) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9)
    return optimizer, SCHEDULERS[name](optimizer)


def advance(optimizer: Any, scheduler: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("num_before", [1, 4])
def test_scheduler_goes_on_as_if_nothing_had_happened(name: str, num_before: int) -> None:
    optimizer, scheduler = make(name)
    advance(optimizer, scheduler, num_before)
    state = through_json(scheduler.state_dict())
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    expected = advance(optimizer, scheduler, 7)

    optimizer, scheduler = make(name)
    optimizer.param_groups[0].update(settings)
    scheduler.load_state_dict(state)
    assert advance(optimizer, scheduler, 7) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "text",
        [1, [2.5, "x"]],
        {"a": {"b": [None]}},
        {3: "three", 4: {5: 6}},
        {(1, 2): "pair", "a": 1},
        {None: 0, True: 1},
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    assert through_json(value) == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors(dtype: torch.dtype) -> None:
    value = {"best": torch.tensor([[0.1, 2.0], [3.0, 0.0]]).to(dtype), "scalar": torch.tensor(2)}
    back = through_json(value)
    assert back["best"].dtype is dtype
    assert torch.equal(back["best"], value["best"])
    assert back["scalar"].shape == ()


def test_what_json_cannot_hold_is_left_out() -> None:
    assert through_json({"call": print, "kept": 1}) == {"call": None, "kept": 1}


class Point(NamedTuple):
    x: int
    y: int


class Level(IntEnum):
    LOW = 1


class Mode(StrEnum):
    FAST = "fast"


class Shown(str):
    def __str__(self) -> str:
        return "something else"


class Table(dict[str, int]):
    """A dict of one's own."""


CYCLE: list[Any] = [1]
CYCLE.append(CYCLE)
ZONE = datetime.timezone(datetime.timedelta(hours=2))


@pytest.mark.parametrize(
    "value",
    [
        (),
        (1, (2, [3, (4,)])),
        {"a": (1, 2), (1, (2, None)): frozenset({(1, 2), frozenset({3})})},
        deque([1, (2, 3)], maxlen=3),
        deque(),
        {1, "a", (2, 3)},
        Counter("abba"),
        Counter([3, 3, 5]),
        OrderedDict([("z", 1), ("a", (2,))]),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {2: 1}),
        {"__tuple__": [1], "z": {"__tensor__": 3, "dtype": "float32"}, "a": {"__int__": "x"}},
        complex(-0.0, math.inf),
        2**20000,
        -(2**20000),
        range(8, 2, -2),
        b"\x00\xff",
        bytearray(b"\x00\xff"),
        datetime.datetime(2024, 2, 29, 23, 59, 59, 999, tzinfo=ZONE),
        datetime.datetime(2024, 2, 29),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3),
        datetime.timedelta(days=-1, microseconds=7),
        Path("/a/b"),
        PurePosixPath("a/b"),
        PureWindowsPath("c:/a"),
        Decimal("1.10"),
        Fraction(1, 3),
        UUID(int=7),
        np.float32(0.1),
        np.float64(0.1),
        np.int64(2**62),
        np.complex64(1 - 2j),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2024-02-29T12:00", "s"),
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        random.Random(3).getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_types_come_back(value: Any) -> None:
    told: list[str] = []
    back = through_json({"a": [value]}, told.append)["a"][0]
    assert back == value
    assert type(back) is type(value)
    if not isinstance(value, int | set):  # too long, and in no order
        assert repr(back) == repr(value)
    assert told == []


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.sampled_from(["__tuple__", "__items__", "__tensor__", "__int__", "dtype"])
    | st.binary()
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
)
KEYS = st.recursive(
    LEAVES, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
VALUES = st.recursive(
    KEYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.builds(deque, st.lists(inner, max_size=4), st.integers(4, 9) | st.none())
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4).map(OrderedDict)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


def layout(value: Any) -> Any:
    """The types in a value, in the order of their values."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(layout(key), layout(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(layout(item)) for item in value)
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [layout(item) for item in value]
    return kind


@settings(deadline=None, max_examples=300)
@given(value=VALUES)
def test_any_nesting_comes_back(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert layout(back) == layout(value)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, "M8[s]", "m8[ns]", "U5", "f2", "?"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_arrays(dtype: Any, shape: tuple[int, ...]) -> None:
    value = (np.arange(math.prod(shape)).reshape(shape) + 1).astype(dtype)
    back = through_json(value)
    assert (back.dtype, back.shape) == (value.dtype, shape)
    assert np.array_equal(back, value)


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_complex_tensors(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    back = through_json(value.conj())
    assert (back.dtype, back.shape) == (torch.complex64, shape)
    assert torch.equal(back, value.conj())


@pytest.mark.parametrize(
    ("value", "kept", "said"),
    [
        (Point(1, 2), (1, 2), "cb.x as Point but as tuple"),
        (Table(a=1), {"a": 1}, "cb.x as Table but as dict"),
        (Level.LOW, 1, "cb.x as Level but as int"),
        (Mode.FAST, "fast", "cb.x as Mode but as str"),
        (Shown("text"), "text", "cb.x as Shown but as str"),
        (nn.Parameter(torch.tensor(2.0)), torch.tensor(2.0), "cb.x as Parameter but as Tensor"),
        (defaultdict(lambda: 3, a=1), {"a": 1}, "cb.x.default_factory (function)"),
        (object(), None, "cb.x (object)"),
        (nn.Identity(), None, "cb.x (Identity)"),
        (CYCLE, [1, None], "cb.x.1 (list inside of itself, or too deep)"),
        (
            np.array([object()]),
            None,
            "cb.x (ndarray: dtype object has no form in JSON)",
        ),
        (
            torch.eye(2).to_sparse(),
            None,
            "cb.x (Tensor: only plain dense tensors have a form in JSON)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_kept_as_it_was_is_said(value: Any, kept: Any, said: str) -> None:
    told: list[str] = []
    written = to_plain({"x": value}, told.append, "cb")
    back = from_plain(json.loads(json.dumps(written)))
    assert back == {"x": kept}
    assert type(back["x"]) is type(kept)
    assert told == [said]


def test_no_depth_fails_a_save() -> None:
    value: Any = ()
    for _ in range(5000):
        value = (value, 1)
    told: list[str] = []
    assert isinstance(through_json(value, told.append), tuple)
    assert len(told) == 1


def test_what_an_older_release_has_written_is_read() -> None:
    assert from_plain({"a": [1, {"__set__": [[1, 2]]}]}) == {"a": [1, {(1, 2)}]}
    assert from_plain({"__items__": [[[1, [2]], "x"], [None, 1]]}) == {(1, (2,)): "x", None: 1}
    assert from_plain({"__counter__": [[3, 1]]}) == Counter([3])
    assert from_plain({"__bytes__": "00ff"}) == b"\x00\xff"
    assert torch.equal(from_plain({"__tensor__": [1.5], "dtype": "float32"}), torch.tensor([1.5]))
    array = from_plain({"__array__": [1, 2], "dtype": "int16"})
    assert array.tolist() == [1, 2]
    assert array.dtype == np.int16


def test_settings_that_an_older_release_has_kept_have_not_changed() -> None:
    settings = OptimizerSettings(
        classes=("AdamW",),
        groups=({"betas": (0.9, 0.95), "lr": np.float64(0.5), "eps": torch.tensor(0.1).double()},),
        schedules=({"type": "MultiStepLR", "milestones": Counter([3]), "shape": lambda x: x},),
    )
    eps = {"__tensor__": torch.tensor(0.1).double().item(), "dtype": "float64"}
    older = {
        "classes": ["AdamW"],
        "groups": [{"betas": [0.9, 0.95], "lr": 0.5, "eps": eps}],
        "schedules": [
            {"type": "MultiStepLR", "milestones": {"__counter__": [[3, 1]]}, "shape": None}
        ],
    }
    told: list[str] = []
    assert to_plain(settings.kept(), told.append) == older
    assert told == []
    assert settings.changes_since(json.loads(json.dumps(older))) == Changes()


def test_a_file_names_no_function() -> None:
    for name in ("load", "save", "Tensor", "ops"):
        with pytest.raises(TypeError, match="no type of tensors"):
            from_plain({"__tensor__": [1], "dtype": name})
    with pytest.raises(KeyError):
        from_plain({"__default__": [], "factory": "eval"})


def test_the_metric_of_a_checkpoint_is_what_was_logged_last() -> None:
    logged = {"val_loss": torch.tensor(0.5), "loss": torch.tensor(2.0)}
    told: list[str] = []

    def newest(name: str | None, known: dict[str, torch.Tensor]) -> Metric | None:
        return Monitored(name, is_told=True, announce=told.append).newest(8, known, 3.0)

    assert newest("val_loss", logged) == Metric(name="val_loss", value=0.5)
    assert newest("loss", logged) == Metric(name="loss", value=2.0)
    assert newest("loss", {}) == Metric(name="loss", value=3.0)
    assert newest(None, logged) is None
    assert Monitored("loss", is_told=True).newest(8, {}, None) is None
    assert told == []
    assert newest("val_loss", {}) is None
    assert len(told) == 1


def test_what_is_monitored_and_never_logged_is_told_once() -> None:
    told: list[str] = []
    for is_told in (True, False):
        monitored = Monitored("val_los", is_told=is_told, announce=told.append)
        for step in (8, 16):
            assert monitored.newest(step, {"val_loss": torch.tensor(0.5)}, 3.0) is None
    (line,) = told
    assert line.startswith("ckpt.monitor=val_los: nothing of that name was logged until step 8")
    assert line.endswith("Logged: loss, val_loss")
