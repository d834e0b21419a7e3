"""Lightning learns ranks from the plan, also where nodes have unequally many devices."""

from __future__ import annotations

import random

import numpy as np
import torch

from hetero_fw.strategies.environment import PlanEnvironment
from hetero_fw.strategies.fsdp import seed_streams
from tests.unit.planning.examples import cluster, plan


def test_places_of_ranks() -> None:
    made = plan(cluster(("a100-80gb", 1, 1), ("v100-32gb", 1, 2)))
    environments = [PlanEnvironment(made, rank) for rank in range(3)]
    assert [e.global_rank() for e in environments] == [0, 1, 2]
    assert [e.local_rank() for e in environments] == [0, 0, 1]
    assert [e.node_rank() for e in environments] == [0, 1, 1]
    assert {e.world_size() for e in environments} == {3}
    environments[0].set_world_size(7)
    environments[0].set_global_rank(7)
    assert (environments[0].world_size(), environments[0].global_rank()) == (3, 0)
    assert environments[0].creates_processes_externally


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def drawn(*key: int | str) -> tuple[float, float, float]:
    seed_streams(*key)
    return draw()


def test_random_numbers_depend_on_what_they_are_for_alone() -> None:
    first = drawn(1, 2, 3)
    draw()
    assert drawn(1, 2, 3) == first
    others = {drawn(0, 2, 3), drawn(1, 3, 2), drawn(1, 2, 0), drawn(12, 3, 3), drawn(1, 23, 3)}
    others |= {drawn("batch", 1, 2, 3), drawn("start", 1)}
    assert len(others | {first}) == 8
