"""Checkpoints that are whole or absent: stage, write, publish, verify, reshard, restore.

A checkpoint is a directory `<prefix>-step-<step>` with one raw file of tensor bytes per rank and a
`manifest.json` that was written last. It exists when that directory was renamed to this name, and
only then; on an object store, which cannot rename, when its manifest was put. Reading one never
executes code: the manifest is JSON and the shards are plain bytes.
"""

from hetero_fw.checkpoint.adoption import misfits
from hetero_fw.checkpoint.catalog import (
    CheckpointInfo,
    find_restorable,
    list_checkpoints,
    num_attempts,
    read_info,
    verify_checkpoint,
)
from hetero_fw.checkpoint.difference import Likeness, TensorDifference, compare_checkpoints
from hetero_fw.checkpoint.digest import weights_digest
from hetero_fw.checkpoint.directories import checkpoint_path, step_of
from hetero_fw.checkpoint.fencing import (
    AttemptDirectories,
    claim_attempt,
    dead_directory,
    fenced_by,
    leave_attempt,
)
from hetero_fw.checkpoint.filling import Filled
from hetero_fw.checkpoint.found import FoundCheckpoint
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.json_state import from_plain, to_plain
from hetero_fw.checkpoint.just_in_time import JustInTimeSave, StandingStep
from hetero_fw.checkpoint.live_state import (
    LiveState,
    flatten_training_state,
)
from hetero_fw.checkpoint.loading import fill_from, load_checkpoint
from hetero_fw.checkpoint.manifest import (
    ChunkEntry,
    FileEntry,
    Manifest,
    Metric,
    NewerFormatError,
    TensorEntry,
    read_manifest,
)
from hetero_fw.checkpoint.module_state import canonical_fqn, check_module
from hetero_fw.checkpoint.newest import find_candidates, load_newest
from hetero_fw.checkpoint.node_copies import (
    NodeCopies,
    NodeFindings,
    examine_node_copies,
    find_node_copies,
)
from hetero_fw.checkpoint.node_place import NodePlace
from hetero_fw.checkpoint.node_roles import NodeRoles, NodeTier
from hetero_fw.checkpoint.object_place import ObjectPlace
from hetero_fw.checkpoint.optimizer_state import optimizer_class
from hetero_fw.checkpoint.place import DirectoryPlace, Place
from hetero_fw.checkpoint.pruning import PruneReport, prune
from hetero_fw.checkpoint.published import prefixes_in, published_paths, runs_below
from hetero_fw.checkpoint.quarantine import (
    Incident,
    Quarantine,
    read_quarantine,
    record_incident,
)
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome, SaveProgress
from hetero_fw.checkpoint.save_planner import SaveContent
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint
from hetero_fw.checkpoint.saver import CheckpointSaver
from hetero_fw.checkpoint.search import TierRoot
from hetero_fw.checkpoint.shard_layout import check_dtypes, shard_file_name
from hetero_fw.checkpoint.sources import PATIENCE_S, DamagedCheckpointError, Rejection
from hetero_fw.checkpoint.storage import (
    StorageError,
    StoragePath,
    is_object_store,
    open_root,
    scheme_of,
)
from hetero_fw.checkpoint.storage_error import StorageFailure, classify
from hetero_fw.checkpoint.training_state import restore_found_state, restore_training_state
from hetero_fw.checkpoint.weights_file import (
    check_weights_file,
    export_weights,
    import_weights,
    load_weights,
)
from hetero_fw.checkpoint.writer_process import WriterProcess

__all__ = [
    "PATIENCE_S",
    "AttemptDirectories",
    "CheckpointInfo",
    "CheckpointSaver",
    "ChunkEntry",
    "DamagedCheckpointError",
    "DirectoryPlace",
    "FileEntry",
    "Filled",
    "FoundCheckpoint",
    "HashAlgorithm",
    "Incident",
    "JustInTimeSave",
    "Likeness",
    "LiveState",
    "Manifest",
    "Metric",
    "NewerFormatError",
    "NodeCopies",
    "NodeFindings",
    "NodePlace",
    "NodeRoles",
    "NodeTier",
    "ObjectPlace",
    "OnPoint",
    "Place",
    "PruneReport",
    "Quarantine",
    "Ranks",
    "Rejection",
    "SaveContent",
    "SaveHandle",
    "SaveOutcome",
    "SavePoint",
    "SaveProgress",
    "StandingStep",
    "StorageError",
    "StorageFailure",
    "StoragePath",
    "TensorDifference",
    "TensorEntry",
    "TierRoot",
    "WriterProcess",
    "canonical_fqn",
    "check_dtypes",
    "check_module",
    "check_weights_file",
    "checkpoint_path",
    "claim_attempt",
    "classify",
    "compare_checkpoints",
    "dead_directory",
    "examine_node_copies",
    "export_weights",
    "fenced_by",
    "fill_from",
    "find_candidates",
    "find_node_copies",
    "find_restorable",
    "flatten_training_state",
    "from_plain",
    "import_weights",
    "is_object_store",
    "leave_attempt",
    "list_checkpoints",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "misfits",
    "num_attempts",
    "open_root",
    "optimizer_class",
    "prefixes_in",
    "prune",
    "published_paths",
    "read_info",
    "read_manifest",
    "read_quarantine",
    "record_incident",
    "restore_found_state",
    "restore_training_state",
    "runs_below",
    "scheme_of",
    "shard_file_name",
    "step_of",
    "to_plain",
    "verify_checkpoint",
    "weights_digest",
]
