"""Train a model on a cluster of unequal devices.

python train.py hardware=a100_v100_mix ckpt=adaptive
python train.py --help
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

# Processes of a run import this file again, so that all the work is behind the main guard.
_ROOT = Path(__file__).resolve().parent


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handles signals until the run listens itself: nothing has begun, and nothing is lost.

    Not by an exception: what imports optional packages may swallow it.
    """
    os.write(sys.stderr.fileno(), b"stopped before training began; run it again\n")
    os._exit(os.EX_TEMPFAIL)


def main() -> int:
    """Check the command line, then run what it describes; returns the exit status."""
    # Hydra looks for its plugins on the module search path.
    for folder in (_ROOT, _ROOT / "plugins"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        os.getcwd()  # noqa: PTH109  # which Hydra asks for too, and tells with a traceback
    except OSError as error:
        print(f"the working directory cannot be used ({error}): change to another", file=sys.stderr)
        return 2
    import hydra
    from omegaconf import DictConfig

    from hetero_fw.app import (
        HYDRA_VERSION_BASE,
        check_command_line,
        job_config,
        report_config_error,
        run,
        worst_status,
    )
    from hetero_fw.errors import ConfigError

    statuses: list[int] = []

    @hydra.main(version_base=HYDRA_VERSION_BASE, config_path="conf", config_name="train")
    def train(config: DictConfig) -> None:
        try:
            statuses.append(run(job_config(config)))
        except ConfigError as error:
            statuses.append(report_config_error(error))

    try:
        sys.argv[1:] = check_command_line(sys.argv[1:])
    except ConfigError as error:
        return report_config_error(error)
    train()
    return worst_status(statuses)


if __name__ == "__main__":
    # What batch systems send. Imports take seconds; processes that are started reset handlers.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stop_at_once)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Before the run listens to signals itself; nothing has started yet.
        print("interrupted before the run started", file=sys.stderr)
        sys.exit(130)
