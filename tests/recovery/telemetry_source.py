"""Readings that tests of emergency saves make up."""

from __future__ import annotations

from hetero_fw.policies import Measure, Reading


class HotRank:
    """Host memory is half full, but on one rank it fills up and stays so.

    Args:
        hot_rank: that rank.
        after_readings: number of readings before it fills up.
        broken_rank: a rank whose readings fail.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: str,
        hot_rank: int = -1,
        after_readings: int = 0,
        broken_rank: int = -1,
    ) -> None:
        assert device == "cpu"
        self._is_hot = rank == hot_rank
        self._is_broken = rank == broken_rank
        self._num_left = after_readings

    def read(self) -> Reading:
        if self._is_broken:
            raise OSError("no sensor")
        self._num_left -= 1
        is_full = self._is_hot and self._num_left < 0
        return Reading(values={Measure.HOST_MEMORY_PERCENT: 97.5 if is_full else 50.0})

    def close(self) -> None:
        """Nothing is held."""
