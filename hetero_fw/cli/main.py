"""Arguments of the `hetero` command and what each subcommand does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hetero_fw
from hetero_fw.cli.ckpt import add_ckpt
from hetero_fw.cli.runs import describe_run, format_run, run_directory
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import write_report

_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (2: bad input)."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        status: int = options.run(options)
    except ConfigError as error:
        if options.command == "plan":
            from hetero_fw.app import report_config_error

            return report_config_error(error)
        return _bad_input(options.command, error)
    except CheckpointError as error:
        return _bad_input(options.command, error)
    return status


def _bad_input(command: str, error: Exception) -> int:
    print(f"hetero {command}: {error}", file=sys.stderr)
    return _BAD_INPUT


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(list(arguments))
    # argparse does not recognize overrides that follow a flag.
    late = [text for text in rest if options.command == "plan" and not text.startswith("-")]
    unknown = [text for text in rest if text not in late]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "plan":
        options.overrides += late
    return options


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hetero", description="Look at plans, machines and runs of hetero_fw.")
    parser.add_argument("--version", action="version", version=f"hetero {hetero_fw.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="predict how a configuration would train, without training",
        description="Plan for the declared devices, present or not. Takes the same overrides as "
        "train.py; hardware.emulate=auto plans for their emulation here instead.",
    )
    plan.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    plan.add_argument("--config-dir", metavar="DIR", help="a folder with further options")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="check whether this machine is ready to train")
    doctor.add_argument(
        "--root", default="outputs", metavar="DIR", help="where runs will be kept (outputs)"
    )
    doctor.set_defaults(run=_doctor)

    status = commands.add_parser("status", help="say where a run stands")
    status.add_argument("run_dir", type=run_directory, metavar="RUN_DIR")
    status.set_defaults(run=_status)

    report = commands.add_parser("report", help="write report.html of a run from what it has left")
    report.add_argument("run_dir", type=run_directory, metavar="RUN_DIR")
    report.set_defaults(run=_report)

    add_ckpt(commands)
    for command in (plan, doctor, status):
        command.add_argument("--json", action="store_true", help="print data only")
    return parser


def _plan(options: argparse.Namespace) -> int:
    # Hydra takes a tenth of a second to import; the other commands do without it.
    from hetero_fw.app import ConfigSource, compose_checked, plan_for
    from hetero_fw.planning import format_plan

    source = ConfigSource(config_dir=options.config_dir)
    _find_targets(Path(source.config_path).parent)
    overrides = ["mode=plan", "hardware.emulate=never", *options.overrides]
    plan = plan_for(compose_checked(overrides, source))
    print(json.dumps(plan.to_dict(), indent=2) if options.json else format_plan(plan))
    return 0


def _find_targets(checkout: Path) -> None:
    """Make the recipes importable, as they are for train.py."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))


def _doctor(options: argparse.Namespace) -> int:
    from hetero_fw.cli.doctor import examine
    from hetero_fw.cli.findings import Level, format_findings

    findings = examine(Path(options.root))
    is_ready = all(finding.level is not Level.PROBLEM for finding in findings)
    if options.json:
        data = {"ready": is_ready, "findings": [finding.to_dict() for finding in findings]}
        print(json.dumps(data, indent=2))
    else:
        print(format_findings(findings))
    return 0 if is_ready else 1


def _status(options: argparse.Namespace) -> int:
    description = describe_run(options.run_dir)
    print(json.dumps(description, indent=2) if options.json else format_run(description))
    return 0


def _report(options: argparse.Namespace) -> int:
    print(write_report(options.run_dir))
    return 0
