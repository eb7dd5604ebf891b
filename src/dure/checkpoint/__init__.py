"""Checkpoints: whole or not there, never half; of a run, or of a state in any sharding.

`Checkpointer` saves and resumes a data-parallel run. Below it: `folder` (names and the atomic
commit), `manifest` and `parts` (files and checksums), `tree` (state without pickle), `objects`
(modules, optimizers and the rest), `randomness` (the generators), `agreement` (all ranks or none).

`save` and `load` (`sharded`) have torch's names, and take DTensors of any mesh and placements into
any other. Below them: `saving` and `restoring`; `background` (`async_save`) and `staging` (its
copies); `flattening` (names), `slices` (who has which elements), `planning` (who writes what),
`slice_files` and `catalog` (what lies where), `weight_folder` (Hugging Face's), `comparing`.

`state_dict` gives the state of models and optimizers under the user's names (`names`), with that of
optimizers that have not stepped (`fresh_state`).
"""

from __future__ import annotations

from dure.checkpoint.checkpointer import Checkpointer, Saved
from dure.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from dure.checkpoint.objects import PerRank
from dure.checkpoint.restoring import Loaded
from dure.checkpoint.sharded import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    async_save,
    load,
    save,
)
from dure.checkpoint.weight_folder import consolidate
from dure.errors import CheckpointException

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "BytesStorageMetadata",
    "CheckpointException",
    "Checkpointer",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "Loaded",
    "Metadata",
    "PerRank",
    "Saved",
    "TensorStorageMetadata",
    "async_save",
    "consolidate",
    "load",
    "save",
]
