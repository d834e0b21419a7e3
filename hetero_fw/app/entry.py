"""What a rank runs, by a name that the supervisor can give without importing what ranks need."""

from __future__ import annotations

# Names of the user's modules that the fork server imports; see `hetero_fw.app.preload`.
PRELOAD_VARIABLE = "HETERO_FW_PRELOAD"


def run_rank(argument: str) -> None:
    """See `hetero_fw.app.worker.run_rank`; in a rank the fork server has imported it already."""
    from hetero_fw.app.worker import run_rank as run

    run(argument)
