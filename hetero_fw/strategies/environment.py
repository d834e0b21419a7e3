"""Tell Lightning which rank this process is, as the plan has it."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

from hetero_fw.planning import ParallelPlan


class PlanEnvironment(ClusterEnvironment):
    """Ranks by the plan; processes are started by the supervisor, not by Lightning.

    Lightning's own environments ask for equally many devices on every node.
    """

    def __init__(self, plan: ParallelPlan, rank: int) -> None:
        super().__init__()
        self._plan = plan
        self._rank = plan.ranks[rank]

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._plan.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """The plan decides; Lightning's count is ignored."""

    @override
    def global_rank(self) -> int:
        return self._rank.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """The plan decides; Lightning's count is ignored."""

    @override
    def local_rank(self) -> int:
        return self._rank.local_rank

    @override
    def node_rank(self) -> int:
        return self._rank.node_index
