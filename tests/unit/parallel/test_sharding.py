from __future__ import annotations

from torch import nn

from hetero_fw.parallel.sharding import shard_units


def test_a_block_that_is_in_a_list_twice_is_one_unit() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    module = nn.Sequential(nn.ModuleList([first, nn.ReLU(), second, first]))
    module.append(nn.ModuleList([second]))
    assert shard_units(module) == [first, second]


def test_what_is_tied_to_something_outside_is_no_unit() -> None:
    blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    blocks[0].weight = blocks[1].weight
    within = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    within[0].weight = within[1].weight
    blocks.append(within)
    assert shard_units(nn.Sequential(blocks)) == [blocks[2], within]
