"""Imported by the fork server: what ranks need, and the user's modules as far as they import.

A module of the user that raises here would end the fork server and, with it, the run without a
word; left out, it raises again in the ranks, which report it.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module

import hetero_fw.app.worker  # noqa: F401  # what every rank runs
from hetero_fw.app.entry import PRELOAD_VARIABLE

for _name in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")):
    with contextlib.suppress(Exception):
        import_module(_name)
