"""A small model in training, and savers for a single process."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    DirectoryPlace,
    HashAlgorithm,
    ObjectPlace,
    SaveOutcome,
    claim_attempt,
    flatten_training_state,
    read_manifest,
)
from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.directories import checkpoint_name

PREFIX = "hetero_ckpt"
WAIT_S = 30.0

Events = list[tuple[str, int | None, dict[str, Any]]]


class Model(nn.Module):
    """Odd sizes, a scalar-sized parameter, a buffer that counts, one that masks with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(7, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale
        return y


def make_optimizer(kind: str, module: nn.Module) -> Optimizer:
    if kind == "sgd":
        return SGD(module.parameters(), lr=0.1, momentum=0.9)
    return AdamW(module.parameters(), lr=0.01, amsgrad=kind == "amsgrad")


def train(module: nn.Module, optimizer: Optimizer, first_step: int, last_step: int) -> None:
    """Steps whose data depend on the step number alone."""
    for step in range(first_step, last_step):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(6, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def trained(seed: int = 0, kind: str = "adamw") -> tuple[Model, Optimizer]:
    torch.manual_seed(seed)
    module = Model()
    optimizer = make_optimizer(kind, module)
    train(module, optimizer, 0, 3)
    return module, optimizer


def claimed(root: Path, attempt: int = 1) -> AttemptDirectories:
    """The directories of an attempt that begins here, or has begun already."""
    own = AttemptDirectories(root=root, attempt=attempt)
    return own if own.staging.is_dir() else claim_attempt(root, attempt)


def in_directory(root: Path) -> DirectoryPlace:
    """A place that an attempt has begun in."""
    return DirectoryPlace(directories=claimed(root))


def in_memory(_: Path) -> ObjectPlace:
    """The same, on an object store of its own."""
    place = ObjectPlace(url=f"memory://{uuid.uuid4().hex}/run", attempt=1)
    place.claim()
    return place


def spec_of(step: int, **others: Any) -> SaveSpec:
    """What a save of `step` says of itself."""
    settings: dict[str, Any] = {
        "name": checkpoint_name(PREFIX, step),
        "token": "token",
        "step": step,
        "attempt": 1,
        "plan_fingerprint": "plan",
        "world_size": 1,
        "reason": "test",
        "hash": HashAlgorithm.XXH3_128,
        **others,
    }
    return SaveSpec(**settings)


def published(root: Path) -> list[str]:
    """Names in `root`, without the directories that attempts work in."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def make_saver(
    root: Path, events: Events | None = None, *, attempt: int = 1, **options: Any
) -> CheckpointSaver:
    def on_event(event: str, step: int | None, fields: dict[str, Any]) -> None:
        if events is not None:
            events.append((event, step, fields))

    settings: dict[str, Any] = {
        "place": DirectoryPlace(directories=claimed(root, attempt)),
        "is_async": True,
        "plan_fingerprint": "plan",
        "timeout_s": WAIT_S,
        **options,
    }
    return CheckpointSaver(
        attempt=attempt,
        prefix=PREFIX,
        rank=0,
        world_size=1,
        store=None,
        process_group=None,
        on_event=on_event,
        **settings,
    )


def save(saver: CheckpointSaver, step: int, tensors: dict[str, torch.Tensor]) -> SaveOutcome:
    """Save and wait for the outcome."""
    handle = saver.save(step, tensors, {"step": step}, reason="test")
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    return handle.outcome


def weights(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Tensors whose every value tells the step."""
    return {
        "model.weight": torch.full((size, 3), float(step)),
        "model.count": torch.tensor(step),
        "model.flags": torch.ones(5, dtype=torch.bool),
        "optim.weight.exp_avg": torch.full((size, 3), -float(step), dtype=torch.bfloat16),
    }


def fill(
    root: Path,
    steps: list[int],
    size: int = 1000,
    algorithm: HashAlgorithm = HashAlgorithm.XXH3_128,
) -> None:
    """Commit a checkpoint for each step."""
    saver = make_saver(root, hash=algorithm)
    for step in steps:
        assert save(saver, step, weights(step, size)).ok


def content_digest(module: nn.Module, optimizer: Optimizer) -> str:
    """Hash of every tensor of the training state, bit for bit."""
    tensors, _ = flatten_training_state(module, optimizer)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
        digest.update(full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_newer(directory: Path) -> None:
    """The checkpoint in `directory` as a release after this one would write it."""
    newer = replace(read_manifest(directory), version=2)
    (directory / "manifest.json").write_text(newer.to_json())
