"""Checkpoints: whole or not there, never half; of a run, or of a state in any sharding.

`save` and `load` (`sharded`) have torch's names, and take DTensors of any mesh and placements into
any other. Below them: `saving` and `restoring`; `background` (`async_save`) and `staging` (its
copies); `tree` (state without pickle, and its names), `slices` (who has which elements), `planning`
(who writes what), `files`, `slice_files` and `catalog` (what lies where), `reading` (all of it),
`agreement` (all ranks or none), `weight_folder` (Hugging Face's).

`Checkpointer` saves a data-parallel run with them and resumes it (`resuming`). Besides: `folder`
(names and the atomic commit), `objects` (modules, optimizers and the rest), `randomness`.

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
