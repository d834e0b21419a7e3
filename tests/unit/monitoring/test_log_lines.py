"""Lines of several processes on one terminal."""

from __future__ import annotations

import logging
import subprocess
import sys

SAYS = """
import logging
from hetero_fw.monitoring import label_log_lines
label_log_lines("rank 1")
label_log_lines("rank 2, writer")
logging.getLogger("hetero_fw.checkpoint.writer").warning("old checkpoints were not %s", "removed")
logging.getLogger("another").warning("as it was")
"""


def test_a_line_begins_with_who_says_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines() == [
        "rank 2, writer: old checkpoints were not removed",
        "as it was",
    ]
    assert logging.getLogger("hetero_fw").handlers == []  # of this process
