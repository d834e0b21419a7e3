"""Checkpoints that are whole or absent: stage, write, publish, verify, reshard, restore.

A checkpoint is a directory `<prefix>-step-<step>` with one raw file of tensor bytes per rank and a
`manifest.json` that was written last. It exists when that directory was renamed to this name, and
only then. Reading one never executes code: the manifest is JSON and the shards are plain bytes.
"""

from hetero_fw.checkpoint.catalog import (
    CheckpointInfo,
    PruneReport,
    find_restorable,
    list_checkpoints,
    prune,
    published_paths,
    read_info,
    verify_checkpoint,
)
from hetero_fw.checkpoint.difference import Likeness, TensorDifference, compare_checkpoints
from hetero_fw.checkpoint.digest import weights_digest
from hetero_fw.checkpoint.directories import checkpoint_path
from hetero_fw.checkpoint.fencing import (
    AttemptDirectories,
    claim_attempt,
    dead_directory,
    fenced_by,
)
from hetero_fw.checkpoint.loading import load_checkpoint
from hetero_fw.checkpoint.manifest import (
    ChunkEntry,
    FileEntry,
    Manifest,
    Metric,
    TensorEntry,
    read_manifest,
)
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint
from hetero_fw.checkpoint.saver import CheckpointSaver
from hetero_fw.checkpoint.storage_error import StorageFailure, classify
from hetero_fw.checkpoint.training_state import (
    buffer_names,
    canonical_fqn,
    flatten_training_state,
    restore_training_state,
)
from hetero_fw.checkpoint.weights_file import export_weights, load_weights

__all__ = [
    "AttemptDirectories",
    "CheckpointInfo",
    "CheckpointSaver",
    "ChunkEntry",
    "FileEntry",
    "Likeness",
    "Manifest",
    "Metric",
    "OnPoint",
    "PruneReport",
    "SaveHandle",
    "SaveOutcome",
    "SavePoint",
    "StorageFailure",
    "TensorDifference",
    "TensorEntry",
    "buffer_names",
    "canonical_fqn",
    "checkpoint_path",
    "claim_attempt",
    "classify",
    "compare_checkpoints",
    "dead_directory",
    "export_weights",
    "fenced_by",
    "find_restorable",
    "flatten_training_state",
    "list_checkpoints",
    "load_checkpoint",
    "load_weights",
    "prune",
    "published_paths",
    "read_info",
    "read_manifest",
    "restore_training_state",
    "verify_checkpoint",
    "weights_digest",
]
