from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hetero_fw.data import ByteTextDataset, RankPart, build_train_loader
from hetero_fw.errors import ConfigError
from recipes.gpt import GPT, GPTModule, gpt_workload

SHAPES = [
    {"vocab_size": 256, "sequence_length": 64, "num_layers": 4, "num_heads": 4, "model_dim": 256},
    {"vocab_size": 64, "sequence_length": 128, "num_layers": 2, "num_heads": 4, "model_dim": 64},
    {"vocab_size": 512, "sequence_length": 32, "num_layers": 1, "num_heads": 2, "model_dim": 32},
]
TINY = SHAPES[2]
BATCH_SIZE = 2


def random_batch(shape: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        shape["vocab_size"], (BATCH_SIZE, shape["sequence_length"] + 1), generator=generator
    )
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def attention_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(*args[:3]))


def attention_backward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(*args[:4]))


# torch counts the attention kernels of every device but the CPU.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_workload_params_are_the_modules(shape: dict[str, int]) -> None:
    params = dict(GPTModule(**shape).named_parameters())
    workload = gpt_workload(**shape)
    assert workload.num_params == sum(param.numel() for param in params.values())
    for layer in workload.layers:
        of_layer = [p.numel() for name, p in params.items() if name.startswith(f"{layer.name}.")]
        assert layer.num_params == sum(of_layer)


@pytest.mark.parametrize("shape", SHAPES)
def test_workload_flops_are_what_torch_counts(shape: dict[str, int]) -> None:
    module = GPTModule(**shape)
    workload = gpt_workload(**shape)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as forward:
        loss = module.training_step(random_batch(shape), 0)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as backward:
        loss.backward()
    for counter, declared in [
        (forward, sum(layer.forward_flops for layer in workload.layers)),
        (backward, sum(layer.backward_flops for layer in workload.layers)),
    ]:
        assert counter.get_total_flops() / BATCH_SIZE == pytest.approx(declared, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_workload_activation_bytes_are_what_is_kept(shape: dict[str, int]) -> None:
    module = GPTModule(**shape)
    of_params = {param.untyped_storage().data_ptr() for param in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_params:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step(random_batch(shape), 0)
    measured = sum(storage.nbytes() for storage in kept.values()) / BATCH_SIZE
    assert loss.requires_grad
    assert measured == pytest.approx(gpt_workload(**shape).activation_bytes_per_sample, rel=0.3)


def test_loss_is_the_mean_over_valid_labels() -> None:
    module = GPTModule(**TINY)
    batch = random_batch(TINY)
    batch["labels"][0, :20] = -100
    logits = module(batch["input_ids"])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(module.training_step(batch, 0), expected)
    assert module.num_targets(batch) == BATCH_SIZE * TINY["sequence_length"] - 20


def test_no_valid_label_is_no_loss() -> None:
    module = GPTModule(**TINY)
    batch = random_batch(TINY)
    batch["labels"].fill_(-100)
    loss = module.training_step(batch, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(not param.grad.any() for param in module.parameters() if param.grad is not None)
    assert module.num_targets(batch) == 0


def test_future_does_not_leak() -> None:
    model = GPT(**TINY).eval()
    tokens = random_batch(TINY)["input_ids"]
    changed = tokens.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(tokens)[:, :20], model(changed)[:, :20])


def test_attention_agrees_with_the_plain_kernel() -> None:
    model = GPT(**TINY, seed=1).double()
    tokens = random_batch(TINY)["input_ids"]
    with sdpa_kernel(SDPBackend.MATH):
        plain = model(tokens)
    torch.testing.assert_close(model(tokens), plain)


def test_initial_weights() -> None:
    weights = GPT(**SHAPES[0], seed=3).state_dict()
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    residual_std = 0.02 / (2 * SHAPES[0]["num_layers"]) ** 0.5
    for name in ("blocks.0.attention.out.weight", "blocks.3.mlp_out.weight"):
        assert weights[name].std().item() == pytest.approx(residual_std, rel=0.05)
    assert not weights["blocks.0.mlp_in.bias"].any()


def test_seed_fixes_the_weights() -> None:
    first, again, other = (GPT(**TINY, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.logits.weight"], other["head.logits.weight"])
    torch.manual_seed(5)
    unseeded = GPT(**TINY).state_dict()
    torch.manual_seed(5)
    assert torch.equal(
        unseeded["head.logits.weight"], GPT(**TINY).state_dict()["head.logits.weight"]
    )


def test_heads_must_divide_the_dimension() -> None:
    with pytest.raises(ConfigError, match=r"num_heads=3 must divide model_dim=32"):
        GPT(**{**TINY, "num_heads": 3})


def test_loss_falls_on_real_text() -> None:
    shape = {**TINY, "vocab_size": 256}
    dataset = ByteTextDataset(sequence_length=shape["sequence_length"], max_bytes=200_000)
    part = RankPart(shares=(32,), rank=0, microbatches=(32,))
    module = GPTModule(**shape, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for [microbatch] in build_train_loader(dataset, seed=0, part=part, max_steps=60):
        optimizer.zero_grad()
        loss = module.training_step(microbatch.batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.1), "log(256): nothing is known at first"
    assert sum(losses[-5:]) / 5 < 3.5
