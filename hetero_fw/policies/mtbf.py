"""Mean time between failures of a cluster, learnt online from the log of all attempts.

Each hardware group fails at its own rate per device; the cluster's rate is the sum over groups. A
group's rate has a Gamma prior (its conjugate for exponential times between failures) and is
updated by the group's own failures and device-seconds, so the estimate is a posterior mean. With
each failure of the cluster the older evidence, prior included, fades: a rate that has stepped is
followed within a few failures, and what nobody can tell from another cluster is not remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_fw.hardware import DeviceKind

# Device-seconds between failures that end a training job, to compare kinds of devices by. CUDA: 466
# interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of Models", arXiv 2407.21783) and one
# in 7.9 h on 1,024 A100 (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
# Research Clusters", arXiv 2410.21680) lie a factor of 6 apart; this is their geometric mean. ROCm
# and TPU: no public figure found, taken as CUDA. CPU: without the GPU issues, 58.7 % of the first.
PRIOR_DEVICE_MTBF_S: Mapping[DeviceKind, float] = {
    DeviceKind.CUDA: 6.9e7,
    DeviceKind.ROCM: 6.9e7,
    DeviceKind.TPU: 6.9e7,
    DeviceKind.CPU: 1.7e8,
}

# Failures that the prior weighs as much as. It is a guess, often wrong by a factor of 10: it should
# hold until the first failure and give way to the first few.
PRIOR_STRENGTH = 0.15
# Failures that are remembered: an estimate from n of them costs about 1 / (16 n) of the waste, one
# that is wrong by a factor of 4 costs a quarter of it until about n / 2 were seen.
MEMORY_FAILURES = 8.0
# Keeps the rate of a group that never fails above 0 however many failures the others have.
_LEAST_FAILURES = 1e-9


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of one hardware group that the plan uses."""

    name: str
    kind: DeviceKind
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt that has ended.

    Attributes:
        duration_s: how long it was exposed to failures.
        num_devices: devices of each group that took part.
        has_failed: it ended by a failure that tells something about the cluster.
        failed_group: where that began, None if unknown.
    """

    duration_s: float
    num_devices: Mapping[str, int]
    has_failed: bool
    failed_group: str | None = None


@dataclass(frozen=True, kw_only=True)
class MtbfEstimate:
    """The cluster's mean time between failures, from how many failures, and how it came about."""

    mtbf_s: float
    num_failures: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class GroupEvidence:
    """Parameters of a group's Gamma posterior: failures, and device-seconds they took."""

    num_failures: float
    exposure_device_s: float

    def faded(self, weight: float, exposure_device_s: float, num_failures: float) -> GroupEvidence:
        """Older evidence at `weight`, and a new piece in full."""
        return GroupEvidence(
            num_failures=max(_LEAST_FAILURES, weight * self.num_failures) + num_failures,
            exposure_device_s=weight * self.exposure_device_s + exposure_device_s,
        )


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """What is known when an attempt starts; `estimate` adds the time that it has run since.

    Attributes:
        evidence: of each group in `groups`, by name.
        num_failures: failures seen, none of them faded.
        prior_mtbf_s: what the prior alone says of these groups.
    """

    groups: tuple[DeviceGroup, ...]
    evidence: Mapping[str, GroupEvidence]
    num_failures: int
    prior_mtbf_s: float

    def estimate(self, elapsed_s: float) -> MtbfEstimate:
        """The estimate after the running attempt has had `elapsed_s` seconds without a failure."""
        rates = self.rates(elapsed_s)
        mtbf_s = 1.0 / sum(rates.values())
        groups = ""
        if len(rates) > 1:
            parts = [f"{name} {1.0 / rate:.4g} s" for name, rate in rates.items()]
            groups = f" ({', '.join(parts)})"
        return MtbfEstimate(
            mtbf_s=mtbf_s,
            num_failures=self.num_failures,
            reason=f"MTBF {mtbf_s:.4g} s{groups} from {self.num_failures} failures and a prior "
            f"of {self.prior_mtbf_s:.4g} s",
        )

    def rates(self, elapsed_s: float) -> dict[str, float]:
        """Failures per second of all devices of each group."""
        rates = {}
        for group in self.groups:
            known = self.evidence[group.name]
            exposure_device_s = known.exposure_device_s + group.num_devices * elapsed_s
            rates[group.name] = group.num_devices * known.num_failures / exposure_device_s
        return rates


def prior_rates(
    groups: Sequence[DeviceGroup], prior_mtbf_s: float | Mapping[str, float]
) -> dict[str, float]:
    """Failures per device-second of each group before any was seen.

    Args:
        groups: what the plan uses.
        prior_mtbf_s: a number is the mean time between failures of the whole cluster, shared out
            among the groups by `PRIOR_DEVICE_MTBF_S`. A mapping has, for some groups, the mean
            time between failures of one device; the others get theirs from that table.
    """
    rates = {group.name: 1.0 / PRIOR_DEVICE_MTBF_S[group.kind] for group in groups}
    if isinstance(prior_mtbf_s, Mapping):
        given = {name: 1.0 / mtbf_s for name, mtbf_s in prior_mtbf_s.items() if name in rates}
        return rates | given
    scale = 1.0 / (prior_mtbf_s * _cluster_rate(groups, rates))
    return {name: rate * scale for name, rate in rates.items()}


def _cluster_rate(groups: Sequence[DeviceGroup], rates: Mapping[str, float]) -> float:
    return sum(group.num_devices * rates[group.name] for group in groups)


def learn_failure_rates(
    groups: Sequence[DeviceGroup],
    prior_mtbf_s: float | Mapping[str, float],
    attempts: Sequence[AttemptRecord],
) -> FailureRates:
    """Fold what earlier attempts have shown, oldest first, into the prior of `groups`."""
    rates = prior_rates(groups, prior_mtbf_s)
    prior_s = 1.0 / _cluster_rate(groups, rates)
    # In proportion to rates: splitting a group of equal devices in two changes no estimate.
    evidence = {
        group.name: GroupEvidence(
            num_failures=PRIOR_STRENGTH * prior_s * group.num_devices * rates[group.name],
            exposure_device_s=PRIOR_STRENGTH * prior_s * group.num_devices,
        )
        for group in groups
    }
    known = FailureRates(
        groups=tuple(groups), evidence=evidence, num_failures=0, prior_mtbf_s=prior_s
    )
    gap: dict[str, float] = {}
    for attempt in attempts:
        for name, num_devices in attempt.num_devices.items():
            gap[name] = gap.get(name, 0.0) + num_devices * attempt.duration_s
        # What fails in a group that is gone says nothing about those that are left.
        if attempt.has_failed and attempt.failed_group in {None, *known.evidence}:
            known, gap = _after_failure(known, gap, attempt.failed_group), {}
    evidence = {
        name: old.faded(1.0, gap.get(name, 0.0), 0.0) for name, old in known.evidence.items()
    }
    return replace(known, evidence=evidence)


def _after_failure(
    known: FailureRates, gap: Mapping[str, float], failed_group: str | None
) -> FailureRates:
    """A failure ends a gap of device-seconds without one; everything older fades."""
    shares = _expected_shares(known) if failed_group is None else {failed_group: 1.0}
    weight = 1.0 - 1.0 / MEMORY_FAILURES
    evidence = {
        name: old.faded(weight, gap.get(name, 0.0), shares.get(name, 0.0))
        for name, old in known.evidence.items()
    }
    return replace(known, evidence=evidence, num_failures=known.num_failures + 1)


def _expected_shares(known: FailureRates) -> dict[str, float]:
    """Each group's share in a failure of unknown origin."""
    rates = known.rates(0.0)
    return {name: rate / sum(rates.values()) for name, rate in rates.items()}
