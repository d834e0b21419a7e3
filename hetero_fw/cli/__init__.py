"""The `hetero` command: look at plans, machines and runs."""

from hetero_fw.cli.main import main

__all__ = ["main"]
