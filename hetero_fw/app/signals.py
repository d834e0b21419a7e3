"""Which signals end a run and which only save it."""

from __future__ import annotations

import signal

from omegaconf import DictConfig

# What batch systems send as a warning ends a process that does not know it.
_WARNINGS = ("SIGUSR1", "SIGUSR2")


def stop_signals(cfg: DictConfig) -> tuple[str, ...]:
    """Names of the signals that end training at the next step boundary."""
    return tuple(name for name in cfg.recovery.signals if name not in save_signals(cfg))


def save_signals(cfg: DictConfig) -> tuple[str, ...]:
    """Names of the signals after which training goes on; they win over `recovery.signals`."""
    emergency = cfg.callbacks.emergency_save
    return tuple(emergency.save_signals) if emergency is not None else ()


def by_name(names: tuple[str, ...]) -> list[signal.Signals]:
    """Signals of these names."""
    return [signal.Signals[name] for name in names]


def ignore_for_now(*names: str) -> None:
    """Pass these signals over until somebody listens for them; main thread only."""
    for number in by_name(names):
        signal.signal(number, signal.SIG_IGN)


def ignore_others(*known: str) -> None:
    """Ignore warnings that nobody listens for; main thread only.

    A SIGTERM that nobody does ends the process, as by default.
    """
    ignore_for_now(*(name for name in _WARNINGS if name not in known))
    if "SIGTERM" not in known:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
