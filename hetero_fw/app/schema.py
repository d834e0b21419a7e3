"""Every configuration key: type, choices, bounds, default and one line of help.

The classes describe the composed configuration and are never instantiated with user input: mutable
dataclasses, as Hydra schemas are. `validate` reads them, `complete` takes their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from hetero_fw.hardware import DEVICES, LINKS

Auto = Literal["auto"]


StopSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]
SaveSignal = Literal["SIGUSR1", "SIGUSR2"]


class Component(dict[str, Any]):
    """A subtree with a `_target_`; its other keys are the target's arguments, free in form."""


class Options(dict[str, Any]):
    """A subtree that only its reader knows; free in form, and never shown."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key must satisfy besides its type.

    Attributes:
        help: one line for users.
        at_least: smallest allowed number; `above` excludes the bound itself.
        at_most: largest allowed number; `below` excludes the bound itself.
        catalog: names to choose from, if they come from a table rather than from the type.
        is_filled: whether a configuration that lacks the key gets its default.
    """

    help: str
    is_filled: bool = True
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    catalog: Iterable[str] | None = None


def key(default: Any, help: str, **bounds: Any) -> Any:
    """Declare a key with a default; a callable default makes the value (lists, dicts)."""
    metadata = {"rule": Rule(help=help, **bounds)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def optional(help: str, **bounds: Any) -> Any:
    """Declare a key that some options have and others lack, for good."""
    return key(None, help, is_filled=False, **bounds)


def required(help: str, **bounds: Any) -> Any:
    """Declare a key that has no default."""
    return field(metadata={"rule": Rule(help=help, **bounds)})


@dataclass(kw_only=True)
class Paths:
    """Where runs are kept."""

    root: str = key("outputs", "directory that holds the run directories")
    run_dir: str | None = key(None, "directory of this run, filled in when the run starts")


@dataclass(kw_only=True)
class Emulation:
    """How CPU processes stand in for devices that are not present."""

    dilation: Auto | float = key("auto", "seconds here for one second on the devices", above=0)
    host_flops_per_s: Auto | float = key("auto", "speed of this machine in FLOP/s", above=0)
    headroom: float = key(2.4, "slack that keeps the pace on a busy machine", at_least=1)


@dataclass(kw_only=True)
class Group:
    """One kind of node."""

    device: str = required("device type by its catalog name", catalog=DEVICES)
    num_nodes: int = key(1, "nodes of this kind, 0 leaves them out", at_least=0)
    devices_per_node: int = key(1, "devices in each node", at_least=1)
    memory_gib: float | None = key(None, "GiB of memory of one device, null: catalog", above=0)
    mfu: float | None = key(None, "share of the peak rate reached", above=0, at_most=1)


@dataclass(kw_only=True)
class Hardware:
    """What devices there are."""

    name: str = required("name of the cluster")
    probe: bool = key(False, "find the devices of this machine when the run starts")
    emulate: Literal["auto", "always", "never"] = key("auto", "stand in for absent devices")
    emulation: Emulation = key(Emulation, "how absent devices are stood in for")
    planning_only: bool = key(False, "can be planned for but not run on")
    notes: list[str] = key(list, "remarks printed with the plan")
    intra_link: str = key("host", "link between the devices of a node", catalog=LINKS)
    inter_link: str = key("host", "link between nodes", catalog=LINKS)
    groups: dict[str, Group] = key(dict, "the nodes, one entry for each kind")


@dataclass(kw_only=True)
class Parallel:
    """How the work is split."""

    kind: Literal["auto", "fsdp", "single"] = key("auto", "how ranks divide the work")
    batch_split: Literal["auto", "uniform"] | list[int] = key(
        "auto", "samples of each rank, or how to choose them", at_least=0
    )
    num_microbatches: Auto | int = key("auto", "micro-batches of each rank", at_least=1)
    max_microbatch_size: int | None = key(None, "largest micro-batch in samples", at_least=1)
    zero_stage: Auto | Literal[2, 3] = key("auto", "2 keeps gathered parameters, 3 frees them")
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = key(
        "auto", "training precision"
    )
    memory_margin: float = key(
        0.1, "share of each device's memory to keep free", at_least=0, at_most=0.9
    )


@dataclass(kw_only=True)
class Tiers:
    """Where checkpoints go before they go to the storage."""

    local: str | None = key(None, "directory on each node's disk or in its memory, null: none")
    storage_interval_steps: int | None = key(
        None, "steps between saves to the storage behind it, null: as ckpt.policy says", at_least=1
    )


@dataclass(kw_only=True)
class Ckpt:
    """When checkpoints are saved and which are kept."""

    policy: Literal["adaptive", "fixed", "none"] = key("adaptive", "when to save")
    interval_steps: int = key(500, "steps between saves", at_least=1)
    first_save_step: int = key(10, "first save, in steps", at_least=1)
    keep_latest_k: int = key(3, "newest checkpoints to keep in the storage", at_least=2)
    keep_best: int = key(1, "checkpoints with the best ckpt.monitor to keep", at_least=0)
    monitor: str | None = key(None, "metric that says which is best, null: none is")
    monitor_mode: Literal["min", "max"] = key("min", "whether less or more is better")
    keep_every_n_steps: int | None = key(
        None, "keep the first at or after every n-th step", at_least=1
    )
    prefix: str = key("hetero_ckpt", "checkpoints are named <prefix>-step-<step>")
    storage: str | None = key(None, "URL or path to keep checkpoints in, null: the run directory")
    storage_options: Options = key(dict, "options of the storage's client, never shown")
    async_mode: Literal["async_with_pinned_mem", "async", "disabled"] = key(
        "async_with_pinned_mem", "who writes: a process, a thread (async) or training itself"
    )
    hash: Literal["xxh3_128", "sha256", "blake2b"] = key(
        "xxh3_128", "xxh3_128 is fastest, the others hold against forgery"
    )
    timeout_s: float = key(
        300, "seconds in which all ranks must write a checkpoint", at_least=1, at_most=86400
    )
    tiers: Tiers = key(Tiers, "where checkpoints go first")
    min_replica_size: int = key(2, "nodes that hold each part under ckpt.tiers.local", at_least=1)
    save_optimizer_states: bool = key(True, "false: weights only, no exact continuation")
    prior_mtbf_s: float | dict[str, float] = key(
        10800.0, "mean time between failures assumed at first, s", above=0
    )


@dataclass(kw_only=True)
class Recovery:
    """What to do when something breaks."""

    max_restarts: int = key(3, "restarts in a row without progress", at_least=0)
    backoff_s: float = key(0.0, "seconds to wait before a restart", at_least=0)
    heartbeat_interval_s: float = key(10, "seconds between signs of life", above=0)
    heartbeat_max_missed: int = key(3, "missed signs of life that mean hung", at_least=1)
    process_group_timeout_s: float = key(300, "seconds before a collective gives up", above=0)
    start_timeout_s: float = key(120, "seconds for all ranks to start and meet", above=0)
    signals: list[StopSignal] = key(
        lambda: ["SIGTERM", "SIGUSR1", "SIGUSR2"], "signals that save and end the run"
    )
    grace_s: float = key(120, "seconds from such a signal until ranks are killed", above=0)


@dataclass(kw_only=True)
class Model:
    """What is trained."""

    module: Component = required("the LightningModule")
    init_from: str | None = key(None, "file of weights that a fresh run starts from")
    workload: Component | None = key(None, "what one sample costs, for the planner")


@dataclass(kw_only=True)
class Data:
    """What it is trained on."""

    train: Component = required("the training dataset (map-style)")
    val: Component | None = key(None, "the validation dataset")
    global_batch_size: int = required(
        "samples in one optimizer step", at_least=1, at_most=100_000_000
    )
    val_batch_size: int = key(32, "samples in one validation batch on one device", at_least=1)
    num_workers: int = key(0, "loader processes of each rank", at_least=0)
    paths: str | list[str] | None = optional("text files or globs")
    sequence_length: int | None = optional("tokens in one sample of text", at_least=1)
    val_fraction: float | None = optional("share of the text for validation", at_least=0, below=1)
    max_bytes: int | None = optional("read at most this many bytes of text", at_least=1)


@dataclass(kw_only=True)
class Optim:
    """Which optimizer moves the weights."""

    optimizer: Component | None = key(None, "torch optimizer, null: the module's own")
    scheduler: Component | None = key(None, "torch scheduler, advanced once a step")
    base_batch_size: int | None = key(None, "global batch the rate was tuned for", at_least=1)


@dataclass(kw_only=True)
class Trainer:
    """How long to train."""

    max_steps: int = required("optimizer steps", at_least=1)
    gradient_clip_val: float | None = key(1.0, "largest gradient norm", above=0)
    val_interval_steps: int | None = key(None, "steps between validations", at_least=1)
    limit_val_batches: int | None = key(None, "validation batches of each rank", at_least=1)


@dataclass(kw_only=True)
class TelemetryLimit:
    """When a reading asks for an emergency save."""

    above: float = required("readings above this are too high")
    sustained_s: float = key(10.0, "seconds they must stay above", at_least=0)
    rearm_below: float | None = key(None, "must fall below this to ask again")


def limit(help: str, **values: float | None) -> Any:
    """Declare a limit with its defaults; without values it is off."""
    if not values:
        return key(None, help)
    return key(lambda: {"rearm_below": None, **values}, help)


@dataclass(kw_only=True)
class EmergencySaves:
    """When to save before it is too late."""

    interval_s: float = key(1.0, "seconds between two readings", above=0)
    cooldown_s: float = key(600.0, "least seconds between two such saves", at_least=0)
    exception_grace_s: float | None = key(
        60.0, "longest stay of a rank that has raised, for a last save; null: none", above=0
    )
    save_signals: list[SaveSignal] = key(list, "signals after which the run saves and goes on")
    source: Component | None = key(None, "where readings come from, null: NVML and psutil")
    host_memory_percent: TelemetryLimit | None = limit(
        "memory of the host or container in use", above=95.0, sustained_s=10.0, rearm_below=90.0
    )
    host_swap_percent: TelemetryLimit | None = limit("swap space in use")
    device_memory_percent: TelemetryLimit | None = limit(
        "device memory that cannot be given back", above=95.0, sustained_s=10.0, rearm_below=90.0
    )
    device_utilization_percent: TelemetryLimit | None = limit("how busy the device is")
    device_temperature_over_slowdown_c: TelemetryLimit | None = limit(
        "degrees over the slowdown threshold", above=-2.0, sustained_s=30.0, rearm_below=-8.0
    )
    device_ecc_errors: TelemetryLimit | None = limit(
        "new uncorrected memory errors", above=0.0, sustained_s=0.0
    )
    device_xid_errors: TelemetryLimit | None = limit(
        "new critical errors of the driver", above=0.0, sustained_s=0.0
    )
    device_throttling: TelemetryLimit | None = limit(
        "1 while heat or lack of power slows it down", above=0.5, sustained_s=60.0
    )


@dataclass(kw_only=True)
class Callbacks:
    """What happens beside the steps; further entries are Lightning callbacks."""

    ENTRIES: ClassVar[Any] = Component | None

    emergency_save: EmergencySaves | None = key(EmergencySaves, "save before it is too late")


@dataclass(kw_only=True)
class Monitor:
    """What is shown while training."""

    progress: Literal["auto", "bar", "lines", "none"] = key("auto", "how progress is shown")
    line_interval_steps: int = key(10, "steps between two step lines", at_least=1)
    report: bool = key(True, "write report.html at the end")


@dataclass(kw_only=True)
class Launch:
    """Where the processes are started."""

    name: Literal["local"] = key("local", "how processes are started")


@dataclass(kw_only=True)
class Config:
    """The whole configuration."""

    run_name: str | None = key(None, "name of the run, null: a new directory")
    resume: Literal["auto", "must", "never"] = key("auto", "whether to continue a run")
    mode: Literal["train", "plan"] = key("train", "train, or plan only")
    seed: int = key(1234, "seed of everything random", at_least=0, below=2**32)
    paths: Paths = key(Paths, "where runs are kept")
    hardware: Hardware = required("what devices there are")
    parallel: Parallel = key(Parallel, "how the work is split")
    ckpt: Ckpt = key(Ckpt, "when to save")
    recovery: Recovery = key(Recovery, "what to do when something breaks")
    model: Model = required("what is trained")
    data: Data = required("what it is trained on")
    optim: Optim = key(Optim, "which optimizer moves the weights")
    trainer: Trainer = required("how long to train")
    callbacks: Callbacks = key(Callbacks, "emergency saves and further Lightning callbacks")
    logger: dict[str, Component | None] = key(dict, "further Lightning loggers")
    monitor: Monitor = key(Monitor, "what is shown while training")
    launch: Launch = key(Launch, "where the processes are started")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One declared key: its resolved type, its rule, and whether it must be given."""

    name: str
    type: Any
    rule: Rule
    is_required: bool


@cache
def keys_of(section: type) -> Mapping[str, Key]:
    """The keys that `section` (one of the classes above) declares, in order."""
    hints = get_type_hints(section)
    return {
        item.name: Key(
            name=item.name,
            type=hints[item.name],
            rule=item.metadata["rule"],
            is_required=item.default is MISSING and item.default_factory is MISSING,
        )
        for item in fields(section)
    }


def section_of(annotation: Any) -> type | None:
    """The section (one of the classes above) that a key of this type may hold, None if none."""
    members = get_args(annotation) or (annotation,)
    return next((m for m in members if isinstance(m, type) and is_dataclass(m)), None)


def entry_type(section: type) -> Any:
    """Type of the entries that users may add to `section` by names of their own; None: none."""
    return getattr(section, "ENTRIES", None)
