"""Train a model on a cluster of unequal devices.

python train.py hardware=a100_v100_mix ckpt=adaptive
python train.py --help
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Processes of a run import this file again, so that all the work is behind the main guard.
_ROOT = Path(__file__).resolve().parent


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
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Before the run listens to signals itself; nothing has started yet.
        print("interrupted before the run started", file=sys.stderr)
        sys.exit(130)
