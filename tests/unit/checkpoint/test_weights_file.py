from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from hetero_fw.checkpoint import (
    LiveState,
    check_weights_file,
    checkpoint_path,
    export_weights,
    flatten_training_state,
    import_weights,
    load_weights,
    read_manifest,
)
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import PREFIX, Model, make_saver, save, trained


@pytest.fixture(scope="module")
def module() -> Model:
    return trained()[0]


@pytest.fixture
def exported(module: Model, tmp_path: Path) -> Path:
    saver = make_saver(tmp_path / "checkpoints")
    tensors, state = flatten_training_state(module, None)
    handle = saver.save(
        3, tensors, state, reason="test", may_be_infinite=LiveState(module, None).buffers
    )
    assert handle.wait(30.0)
    out = tmp_path / "weights.safetensors"
    export_weights(checkpoint_path(tmp_path / "checkpoints", PREFIX, 3), out)
    return out


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    pairs = zip(left.state_dict().items(), right.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_an_export_loads_without_this_project(module: Model, exported: Path) -> None:
    plain = Model()
    plain.load_state_dict(load_file(exported))
    assert same(plain, module)
    header_length = int.from_bytes(exported.read_bytes()[:8], "little")
    header = json.loads(exported.read_bytes()[8 : 8 + header_length])
    assert header["__metadata__"] == {"format": "pt", "step": "3"}
    assert list(exported.parent.glob(".*.tmp")) == []


def test_an_export_can_be_started_from(module: Model, exported: Path) -> None:
    fresh = Model()
    load_weights(fresh, exported)
    assert same(fresh, module)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_plain_state_dict_can_be_started_from(
    module: Model, tmp_path: Path, is_wrapped: bool
) -> None:
    content = module.state_dict()
    torch.save({"state_dict": content} if is_wrapped else content, tmp_path / "weights.pt")
    fresh = Model()
    load_weights(fresh, tmp_path / "weights.pt")
    assert same(fresh, module)


def test_an_export_never_overwrites(exported: Path, tmp_path: Path) -> None:
    before = exported.read_bytes()
    path = checkpoint_path(tmp_path / "checkpoints", PREFIX, 3)
    with pytest.raises(CheckpointError, match="exists already"):
        export_weights(path, exported)
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_weights(path, tmp_path / "absent" / "out")
    assert exported.read_bytes() == before


def test_a_dtype_that_safetensors_lacks_is_an_error(tmp_path: Path) -> None:
    outcome = save(make_saver(tmp_path), 1, {"model.x": torch.ones(2, dtype=torch.complex128)})
    assert outcome.path is not None
    with pytest.raises(CheckpointError, match="complex128"):
        export_weights(outcome.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_and_sizes_must_fit_and_are_all_told(module: Model, tmp_path: Path) -> None:
    weights = dict(module.state_dict())
    weights["first.wieght"] = weights.pop("first.weight")
    weights["last.weight"] = torch.zeros(7, 3)
    weights["norm.num_batches_tracked"] = torch.tensor(1.0)
    save_file(weights, tmp_path / "weights.safetensors")
    fresh = Model()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(fresh, tmp_path / "weights.safetensors")
    message = str(caught.value)
    assert "the module has no first.wieght. Did you mean 'first.weight'?" in message
    assert "first.weight is missing" in message
    assert "last.weight is [7, 3], expected [3, 7]" in message
    assert "norm.num_batches_tracked is torch.float32, expected torch.int64" in message
    assert "\n" not in message
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    save_file({f"x{i}": torch.zeros(1) for i in range(20)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="and 23 more"):
        load_weights(Model(), tmp_path / "weights")


def test_precision_may_differ(module: Model, tmp_path: Path) -> None:
    half = {n: t.half() if t.is_floating_point() else t for n, t in module.state_dict().items()}
    save_file(half, tmp_path / "weights")
    fresh = Model()
    load_weights(fresh, tmp_path / "weights")
    torch.testing.assert_close(fresh.last.weight, module.last.weight, atol=1e-3, rtol=1e-3)


class LightningModel(pl.LightningModule):
    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, width)


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize("takes", [load_weights, import_weights])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_bomb_does_not_run(tmp_path: Path, kind: str, takes: Callable[..., Any]) -> None:
    file, mark = tmp_path / "weights.pt", tmp_path / "exploded"
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"first.weight": Bomb(mark)}, file)
    out = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match="none of its code was run"):
        takes(*((Model(), file) if takes is load_weights else (file, out)))
    assert not mark.exists()
    assert not out.exists()


def test_a_state_dict_can_be_imported(module: Model, tmp_path: Path) -> None:
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    out = tmp_path / "out.safetensors"
    assert import_weights(tmp_path / "weights.pt", out) == len(module.state_dict())
    fresh = Model()
    load_weights(fresh, out)
    assert same(fresh, module)
    assert import_weights(out, tmp_path / "again.safetensors") == len(module.state_dict())
    assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()


def test_tied_weights_views_and_wrapped_names_can_be_imported(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    content = {"_orig_mod.first": tied, "second": torch.nn.Parameter(tied), "third": tied.T}
    torch.save(content, tmp_path / "weights.pt")
    out = tmp_path / "out.safetensors"
    import_weights(tmp_path / "weights.pt", out)
    loaded = load_file(out)
    assert sorted(loaded) == ["first", "second", "third"]
    assert torch.equal(loaded["third"], tied.T)


class Tied(torch.nn.Module):
    """As a language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.out = torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight


def test_tied_weights_may_be_there_under_one_name(tmp_path: Path) -> None:
    module = Tied()
    save_model(module, str(tmp_path / "one"))
    assert len(load_file(tmp_path / "one")) == len(module.state_dict()) - 1
    import_weights(tmp_path / "one", tmp_path / "imported")
    for path in (tmp_path / "one", tmp_path / "imported"):
        with torch.device("meta"):
            check_weights_file(path, Tied())
        fresh = Tied()
        load_weights(fresh, path)
        assert same(fresh, module)
        assert fresh.out.weight is fresh.embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_weights_have_one_value(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    content["out.weight"] = content["out.weight"].to(dtype)
    torch.save(content, tmp_path / "weights.pt")
    check_weights_file(tmp_path / "weights.pt", Tied())
    content["out.weight"][4, 2] += 1
    torch.save(content, tmp_path / "weights.pt")
    differ = "embedding.weight and out.weight are one tensor there, but differ"
    with pytest.raises(CheckpointError, match=differ), torch.device("meta"):
        check_weights_file(tmp_path / "weights.pt", Tied())
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=differ):
        load_weights(module, tmp_path / "weights.pt")
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    del content["embedding.weight"], content["out.weight"]
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"embedding.weight is missing; out"):
        load_weights(module, tmp_path / "weights.pt")


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    for look in (check_weights_file, lambda path, module: load_weights(module, path)):
        with pytest.raises(CheckpointError, match="_extra_state of the module is no tensor"):
            look(path, WithExtraState(2, 2))


def test_a_checkpoint_of_lightning_can_be_imported(tmp_path: Path) -> None:
    module = LightningModel(width=3, activation="tanh")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    out = tmp_path / "out.safetensors"
    assert import_weights(tmp_path / "lightning.ckpt", out) == 2
    assert torch.equal(load_file(out)["layer.weight"], module.layer.weight)


def test_an_import_must_fit_the_checkpoint_that_is_named(
    module: Model, exported: Path, tmp_path: Path
) -> None:
    like = read_manifest(checkpoint_path(tmp_path / "checkpoints", PREFIX, 3))
    assert import_weights(exported, tmp_path / "out", like) == len(module.state_dict())
    wrong = {**module.state_dict(), "last.weight": torch.zeros(7, 3)}
    torch.save(wrong, tmp_path / "wrong.pt")
    with pytest.raises(
        CheckpointError, match=r"step 3: last.weight is \[7, 3\], expected \[3, 7\]"
    ):
        import_weights(tmp_path / "wrong.pt", tmp_path / "other", like)
    assert not (tmp_path / "other").exists()


def test_what_is_no_plain_tensor_is_not_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="w is no plain tensor"):
        import_weights(tmp_path / "weights.pt", tmp_path / "out")


def test_other_files_are_named(module: Model, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(module, tmp_path / "absent")
    (tmp_path / "text").write_text("weights, 3 of them")
    with pytest.raises(CheckpointError, match="neither a safetensors file nor"):
        load_weights(module, tmp_path / "text")
    (tmp_path / "torn").write_bytes(b"\x10" + bytes(7) + b'{"a": ')
    with pytest.raises(CheckpointError, match=r"torn: cannot be read"):
        load_weights(module, tmp_path / "torn")
    torch.save([torch.ones(1)], tmp_path / "list")
    with pytest.raises(CheckpointError, match="holds a list, not a state_dict"):
        load_weights(module, tmp_path / "list")
    torch.save({"epoch": 3, "w": torch.ones(1)}, tmp_path / "more")
    with pytest.raises(CheckpointError, match="not a state_dict of tensors alone: epoch"):
        load_weights(module, tmp_path / "more")


def test_a_file_is_known_by_its_beginning(module: Model, exported: Path, tmp_path: Path) -> None:
    check_weights_file(exported)
    path = tmp_path / "weights"
    torch.save(module.state_dict(), path)
    check_weights_file(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="weights: "):
        check_weights_file(path)
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False)
    check_weights_file(path)
    torch.save(module, path)
    with pytest.raises(CheckpointError, match="none of its code was run"):
        check_weights_file(path)
    path.write_bytes(exported.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_weights_file(path)
    for content in (b"", b"[model]\nweights=none\n", pickle.dumps({"a": 1}), b"\x80\x02"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is neither a safetensors file nor"):
            check_weights_file(path)


def write(path: Path, weights: dict[str, torch.Tensor], kind: str) -> None:
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind == "torch")


@pytest.mark.parametrize("kind", ["safetensors", "torch", "older"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_are_named(
    module: Model, tmp_path: Path, kind: str, value: float
) -> None:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["last.weight"] = state["last.weight"].double()
    state["last.weight"][1, 2] = value
    write(tmp_path / "weights", state, kind)
    fresh = Model()
    with pytest.raises(CheckpointError, match=r"weights: last\.weight holds a"):
        check_weights_file(tmp_path / "weights", fresh)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"weights: last\.weight holds a"):
        load_weights(fresh, tmp_path / "weights")
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(3).double())
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.ones(0))


def test_a_buffer_may_hold_infinities_and_no_nan(tmp_path: Path) -> None:
    module, path = Masked(), tmp_path / "weights"
    state = {**module.state_dict(), "mask": torch.tensor([0.0, float("-inf"), 1e300])}
    torch.save(state, path)
    check_weights_file(path)
    load_weights(module, path)
    assert torch.equal(module.get_buffer("mask"), state["mask"].double())
    torch.save({**state, "mask": torch.full((3,), float("nan"))}, path)
    with pytest.raises(CheckpointError, match="mask holds a NaN"):
        check_weights_file(path)
    torch.save({**state, "scale": torch.full((3,), float("inf"))}, path)
    check_weights_file(path)  # it may be a buffer
    with pytest.raises(CheckpointError, match="scale holds a value that is infinite"):
        check_weights_file(path, module)
    with pytest.raises(CheckpointError, match="scale holds a value that is infinite"):
        load_weights(module, path)
    torch.save({**state, "phase": torch.tensor([1j, complex("nan")])}, path)
    with pytest.raises(CheckpointError, match="phase holds a NaN"):
        check_weights_file(path)


def test_eight_bits_are_looked_at_too(tmp_path: Path) -> None:
    low = torch.ones(3).to(torch.float8_e4m3fn)
    torch.save({"weight": low}, tmp_path / "weights")
    check_weights_file(tmp_path / "weights")
    torch.save({"weight": torch.full((3,), float("nan")).to(torch.float8_e4m3fn)}, tmp_path / "bad")
    with pytest.raises(CheckpointError, match="weight holds a NaN"):
        check_weights_file(tmp_path / "bad")


@pytest.mark.parametrize("takes", [check_weights_file, lambda path: load_weights(Model(), path)])
@pytest.mark.parametrize(
    "odd", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")], ids=["sparse", "meta"]
)
def test_tensors_without_plain_values_are_named(
    module: Model, tmp_path: Path, odd: torch.Tensor, takes: Callable[[Path], None]
) -> None:
    torch.save({**module.state_dict(), "first.weight": odd}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"weights: first\.weight is no plain tensor"):
        takes(tmp_path / "weights")


def test_what_a_module_takes_decides_what_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for dtype, value, fits in (
        (torch.float64, 1e300, True),
        (torch.float16, 1e5, False),
        (torch.float32, 1e5, True),
    ):
        module = torch.nn.Linear(2, 1, dtype=dtype)
        torch.save(
            {"weight": torch.full((1, 2), value, dtype=torch.float64), "bias": torch.zeros(1)}, path
        )
        for use in (
            lambda m=module: check_weights_file(path, m),
            lambda m=module: load_weights(m, path),
        ):
            if fits:
                use()
            else:
                with pytest.raises(CheckpointError, match="weight holds a value that is infinite"):
                    use()


def test_a_module_that_knows_no_sizes_yet_takes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    torch.save({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="weight has no size before the module was used"):
        check_weights_file(path, torch.nn.LazyLinear(1))
