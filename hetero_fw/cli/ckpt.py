"""`hetero ckpt`: look at the checkpoints of a run, export, compare and delete them; import weights.

A run is named by its directory, or by the path or URL at which its checkpoints lie.

The functions import what they need: with torch it takes seconds, and the parser is needed always.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetero_fw.cli.runs import run_directory
from hetero_fw.monitoring import RunDirectory


def add_ckpt(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `ckpt` and its own commands to those of `hetero`."""
    parser = commands.add_parser(
        "ckpt", help="list, verify, export, compare, prune and import checkpoints"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = _action(actions, "ls", _list, "list the checkpoints of a run")
    listing.add_argument("--verify", action="store_true", help="read every byte, which takes time")

    verify = _action(actions, "verify", _verify, "compare every byte with what was written")
    verify.add_argument("--step", type=int, metavar="N", help="this one only")

    export = _action(actions, "export", _export, "write the full weights as one safetensors file")
    export.add_argument("out", type=Path, metavar="OUT", help="a new file, OUT.safetensors")
    export.add_argument("--step", type=int, metavar="N", help="default: the newest intact one")

    prune = _action(actions, "prune", _prune, "read newer checkpoints back and delete old ones")
    prune.add_argument(
        "--keep", type=_at_least_two, required=True, metavar="K", help="newest to keep, 2 or more"
    )
    prune.add_argument(
        "--newest-only",
        action="store_true",
        help="keep nothing besides, for checkpoints whose run directory is gone; nothing may save "
        "there meanwhile",
    )

    diff = _action(actions, "diff", _diff, "compare two checkpoints tensor by tensor")
    diff.add_argument("a", type=int, metavar="A", help="step of the one")
    diff.add_argument("b", type=int, metavar="B", help="step of the other")

    _add_import(actions)


def _add_import(actions: argparse._SubParsersAction[Any]) -> None:
    what = "make a file for model.init_from of weights from elsewhere, without running their code"
    parser = actions.add_parser("import", help=what, description=what)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="safetensors, a state_dict by torch.save, or a checkpoint of Lightning with one in it",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new file, OUT.safetensors")
    parser.add_argument(
        "--like",
        type=_source,
        metavar="RUN_DIR",
        help="refuse it unless names and sizes are those of this run's newest checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print data only")
    parser.set_defaults(run=_import)


def _action(
    actions: argparse._SubParsersAction[Any], name: str, run: Any, help: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
    parser.add_argument(
        "run_dir",
        type=_source,
        metavar="RUN_DIR",
        help="its directory, or the path or URL of its checkpoints: STORAGE/RUN_NAME",
    )
    parser.add_argument("--json", action="store_true", help="print data only")
    parser.set_defaults(run=run)
    return parser


def _source(text: str) -> RunDirectory | str:
    if "://" in text and not text.startswith("file://"):
        return text
    path = Path(text.removeprefix("file://"))
    # A path as in ckpt.storage, of one run or of several, is named like a URL.
    holds_checkpoints = (next(path.glob(f"{depth}*-step-*/"), None) for depth in ("", "*/"))
    is_run = (path / "plan.json").is_file() or (path / "status.json").is_file()
    if not is_run and any(holds_checkpoints):
        return f"file://{path.absolute()}"
    return run_directory(str(path))


def _at_least_two(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 2:
        raise argparse.ArgumentTypeError(
            f"{number} is too few: the newest checkpoint can turn out to be unreadable"
        )
    return number


def _list(options: argparse.Namespace) -> int:
    from hetero_fw.cli.checkpoints import CheckpointStore
    from hetero_fw.cli.listing import describe_checkpoints, format_checkpoints

    store = CheckpointStore.of(options.run_dir)
    rows = describe_checkpoints(store, reads_bytes=options.verify)
    print(json.dumps(rows, indent=2) if options.json else format_checkpoints(rows))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Exit status 1 if one of them, or a copy, is damaged or not whole here, or there is none."""
    from hetero_fw.cli.checkpoints import CheckpointStore
    from hetero_fw.cli.listing import describe_checkpoints, format_checkpoints

    store = CheckpointStore.of(options.run_dir)
    rows = describe_checkpoints(store, reads_bytes=True, step=options.step)
    print(json.dumps(rows, indent=2) if options.json else format_checkpoints(rows))
    is_sound = all(row["is_verified"] and not row["problem"] for row in rows)
    return 0 if rows and is_sound else 1


def _export(options: argparse.Namespace) -> int:
    from hetero_fw.checkpoint import export_weights
    from hetero_fw.cli.checkpoints import CheckpointStore

    store = CheckpointStore.of(options.run_dir)
    path = store.newest_intact() if options.step is None else store.path(options.step)
    num_tensors = export_weights(path, options.out)
    if options.json:
        data = {"source": str(path), "path": str(options.out), "num_tensors": num_tensors}
        print(json.dumps(data, indent=2))
    else:
        print(f"{options.out}: {num_tensors} tensors of {path.name}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from hetero_fw.checkpoint import import_weights, read_manifest
    from hetero_fw.cli.checkpoints import CheckpointStore

    like = None
    if options.like is not None:
        like = read_manifest(CheckpointStore.of(options.like).newest_intact())
    num_tensors = import_weights(options.file, options.out, like)
    if options.json:
        data = {
            "source": str(options.file),
            "path": str(options.out),
            "num_tensors": num_tensors,
        }
        print(json.dumps(data, indent=2))
    else:
        print(f"{options.out}: {num_tensors} tensors of {options.file}")
        print(f"start from them with model.init_from={options.out}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    from hetero_fw.cli.checkpoints import CheckpointStore, run_of

    source = run_of(options.run_dir)
    # A run that goes on prunes by itself; nobody else moves its checkpoints meanwhile.
    with source.lock() if isinstance(source, RunDirectory) else nullcontext():
        store = CheckpointStore.of(source)
        report = store.prune(options.keep, newest_only=options.newest_only)
    deleted = [path.name for path in report.deleted]
    if options.json:
        print(json.dumps({"deleted": deleted, "reason": report.reason}, indent=2))
    else:
        print("\n".join([*(f"deleted {name}" for name in deleted), report.reason]))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from hetero_fw.checkpoint import compare_checkpoints
    from hetero_fw.cli.checkpoints import CheckpointStore, format_difference

    store = CheckpointStore.of(options.run_dir)
    differences = list(compare_checkpoints(store.path(options.a), store.path(options.b)))
    if options.json:
        print(json.dumps([asdict(item) for item in differences], indent=2))
    else:
        print(format_difference(differences))
    return 0
