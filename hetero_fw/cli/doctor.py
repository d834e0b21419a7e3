"""Look at everything on this machine that has kept people from training, before it does."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hetero_fw.cli.findings import Finding, Level
from hetero_fw.cli.gpus import Gpu, list_gpus, runs_on
from hetero_fw.hardware import GIB

_PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "nvidia-ml-py")
_LEFT_OVER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MIN_FREE_BYTES = 2 * GIB
_MIN_SHM_BYTES = GIB // 4
_MIN_OPEN_FILES = 1024


def examine(root: Path) -> list[Finding]:
    """Run every check.

    Args:
        root: directory that runs will be kept in; it need not exist yet.
    """
    gpus = list_gpus()
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _software,
        _processor,
        lambda: _torch(gpus),
        lambda: describe_gpus(gpus),
        _host_name,
        lambda: _output_root(root),
        _shared_memory,
        _open_files,
        _environment,
        _plugins,
    )
    return [finding for check in checks for finding in check()]


def _software() -> Iterator[Finding]:
    yield Finding(subject="python", detail=f"{platform.python_version()} on {platform.platform()}")
    versions, missing = [], []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(subject="packages", detail=", ".join(versions))
    if missing:
        yield Finding(
            subject="packages",
            level=Level.PROBLEM,
            detail=f"not installed: {', '.join(missing)}",
            remedy=f"pip install {' '.join(missing)}",
        )


def _processor() -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding(
        subject="processor",
        detail=f"{num_cores} cores for this process, {_gib(memory.available)} of "
        f"{_gib(memory.total)} memory free, OMP_NUM_THREADS {threads}",
    )


def _torch(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        detail = f"cannot be imported: {error}"
        yield Finding(subject="torch", level=Level.PROBLEM, detail=detail, remedy="reinstall torch")
        return
    yield from judge_torch(
        version=torch.__version__, arch_list=torch.cuda.get_arch_list(), gpus=gpus
    )
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        has_nccl = torch.distributed.is_nccl_available()
        yield Finding(subject="backends", detail="gloo, nccl" if has_nccl else "gloo")
    else:
        yield Finding(
            subject="backends",
            level=Level.PROBLEM,
            detail="this torch has no gloo, which CPU ranks and checkpoints need",
            remedy="install an official torch wheel",
        )


def judge_torch(*, version: str, arch_list: list[str], gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Say whether a torch build has code for every GPU."""
    built_for = " ".join(arch_list) or "CPU only"
    lacking = sorted({gpu.name for gpu in gpus if not runs_on(gpu.compute_capability, arch_list)})
    if not lacking:
        yield Finding(subject="torch", detail=f"{version}, built for {built_for}")
        return
    remedy = "install the CUDA build of torch"
    if any(gpu.compute_capability < (7, 5) for gpu in gpus):
        # https://github.com/pytorch/pytorch/issues/172352
        remedy = (
            "Volta and older need the CUDA 12.6 wheels from torch 2.11 on: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu126"
        )
    yield Finding(
        subject="torch",
        level=Level.PROBLEM,
        detail=f"{version}, built for {built_for}, has no code for {', '.join(lacking)}",
        remedy=remedy,
    )


def describe_gpus(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """List the GPUs and the precision that suits them."""
    if not gpus:
        detail = "none; devices that a profile declares are emulated by CPU processes"
        yield Finding(subject="gpus", detail=detail)
        return
    for gpu in gpus:
        major, minor = gpu.compute_capability
        precision = "bf16 native" if gpu.is_bf16_native else "no native bf16, use 16-mixed"
        yield Finding(
            subject="gpus",
            detail=f"{gpu.name}, {_gib(gpu.memory_bytes)}, sm_{major}{minor}, {precision}, "
            f"{gpu.uuid}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        detail = f"CUDA_VISIBLE_DEVICES={visible} limits what torch sees"
        yield Finding(subject="gpus", level=Level.NOTE, detail=detail)


def _host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        # gloo binds to the address that the host name resolves to.
        yield Finding(
            subject="host name",
            level=Level.NOTE,
            detail=f"{name} does not resolve ({error.strerror})",
            remedy=f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface to use",
        )
    else:
        yield Finding(subject="host name", detail=f"{name} is {address}")


def _output_root(root: Path) -> Iterator[Finding]:
    existing = next(
        folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists()
    )
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".hetero-doctor-") as folder:
            _write_durably(Path(folder))
    except OSError as error:
        yield Finding(
            subject="output root",
            level=Level.PROBLEM,
            detail=f"{existing} cannot be written: {error.strerror}",
            remedy="choose another directory with paths.root=DIRECTORY",
        )
        return
    free_bytes = shutil.disk_usage(existing).free
    detail = f"{existing}: write, rename and fsync work, {_gib(free_bytes)} free"
    if free_bytes < _MIN_FREE_BYTES:
        remedy = "a checkpoint takes 12 bytes for each parameter, and several are kept"
        yield Finding(subject="output root", level=Level.NOTE, detail=detail, remedy=remedy)
    else:
        yield Finding(subject="output root", detail=detail)


def _write_durably(folder: Path) -> None:
    with (folder / "written").open("wb") as file:
        file.write(b"hetero")
        file.flush()
        os.fsync(file.fileno())
    (folder / "written").rename(folder / "renamed")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding(subject="/dev/shm", level=Level.NOTE, detail="there is none")
        return
    total = shutil.disk_usage(path).total
    if total < _MIN_SHM_BYTES:
        yield Finding(
            subject="/dev/shm",
            level=Level.NOTE,
            detail=f"{_gib(total)}: too small for loader processes (data.num_workers > 0)",
            remedy="docker run --shm-size=2g",
        )
    else:
        yield Finding(subject="/dev/shm", detail=_gib(total))


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        detail = f"at most {soft}; many ranks and loader processes need more"
        remedy = f"ulimit -n {hard}"
        yield Finding(subject="open files", level=Level.NOTE, detail=detail, remedy=remedy)
    else:
        yield Finding(subject="open files", detail=f"at most {soft}")


def _environment() -> Iterator[Finding]:
    left_over = [name for name in _LEFT_OVER if name in os.environ]
    if left_over:
        yield Finding(
            subject="environment",
            level=Level.NOTE,
            detail=f"{', '.join(left_over)} set by another launcher; a run ignores them",
        )


def _plugins() -> Iterator[Finding]:
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher
    from hydra.plugins.sweeper import Sweeper

    found = [*Plugins.instance().discover(Launcher), *Plugins.instance().discover(Sweeper)]
    names = ", ".join(sorted(plugin.__name__ for plugin in found))
    yield Finding(subject="hydra plugins", detail=names)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
