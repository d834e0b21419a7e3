"""Whether to save the step that all ranks stand at, when one of them has raised an exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JustInTimeObservation:
    """What is known when a rank has raised.

    Attributes:
        step: optimizer steps completed.
        safe_step: step of the newest checkpoint that is published, 0 without one.
        step_time_s: usual time of a step, None before it is known.
        save_time_s: usual time from the start of a save until it is published, None likewise.
        grace_s: longest time that the rank may stay to let it happen.
    """

    step: int
    safe_step: int
    step_time_s: float | None
    save_time_s: float | None
    grace_s: float


@dataclass(frozen=True, kw_only=True)
class JustInTimeDecision:
    """Whether to save, and why."""

    save: bool
    reason: str


def decide_just_in_time(observed: JustInTimeObservation) -> JustInTimeDecision:
    """Save what would take longer to compute again than to save.

    A restart computes the steps since the newest checkpoint once more; a save holds the restart
    up for as long as it takes. What is not known yet speaks for the save: it has a bound.
    """
    num_steps = observed.step - observed.safe_step
    if num_steps <= 0:
        return JustInTimeDecision(save=False, reason=f"step {observed.step} is safe already")
    again_s = None if observed.step_time_s is None else num_steps * observed.step_time_s
    save_s = observed.save_time_s
    if save_s is not None and save_s > observed.grace_s:
        reason = f"a save takes {save_s:.3g} s, longer than the {observed.grace_s:.3g} s it may"
        return JustInTimeDecision(save=False, reason=reason)
    if save_s is not None and again_s is not None and save_s > again_s:
        reason = f"to compute {num_steps} steps again takes {again_s:.3g} s, a save {save_s:.3g} s"
        return JustInTimeDecision(save=False, reason=reason)
    work = "" if again_s is None else f", {again_s:.3g} s of work,"
    return JustInTimeDecision(
        save=True, reason=f"{num_steps} steps{work} since step {observed.safe_step}"
    )
