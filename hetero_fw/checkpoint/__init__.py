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
    verify_checkpoint,
)
from hetero_fw.checkpoint.digest import weights_digest
from hetero_fw.checkpoint.directories import checkpoint_path, remove_stale_temporaries
from hetero_fw.checkpoint.loading import load_checkpoint
from hetero_fw.checkpoint.manifest import (
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    read_manifest,
)
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.saver import CheckpointSaver
from hetero_fw.checkpoint.training_state import (
    buffer_names,
    flatten_training_state,
    restore_training_state,
)

__all__ = [
    "CheckpointInfo",
    "CheckpointSaver",
    "ChunkEntry",
    "FileEntry",
    "Manifest",
    "PruneReport",
    "SaveHandle",
    "SaveOutcome",
    "TensorEntry",
    "buffer_names",
    "checkpoint_path",
    "find_restorable",
    "flatten_training_state",
    "list_checkpoints",
    "load_checkpoint",
    "prune",
    "read_manifest",
    "remove_stale_temporaries",
    "restore_training_state",
    "verify_checkpoint",
    "weights_digest",
]
