"""Checkpoints: complete or absent, never half; of a run, or of a state in any sharding.

`save` and `load` (`sharded`) have torch's names, and take DTensors of any mesh and placements into
any other. Below them: `saving` and `restoring`; `background` (`async_save`) and `staging` (its
copies); `tree` (state without pickle, and its names), `slices` (each rank's elements), `planning`
(each rank's writes), `files`, `slice_files`, `runs`, `contents` and `catalog` (places in files),
`reading` (all of it), `agreement` (all ranks or none), `weight_folder` (Hugging Face's). `planned`
calls custom planners and storages (`planner`, `storage`), with the readers of `file_storages`.
Files are opened, written and committed by `file_systems`: local ones, or those of a store.

`Checkpointer` saves a data-parallel run with them and resumes it (`resuming`). Besides: `folder`
(names and the atomic commit), `objects` (modules, optimizers and the rest), `randomness`.

`state_dict` gives the state of models and optimizers under the user's names (`names`), with that of
optimizers that have not stepped (`fresh_state`), in several forms (`state_forms`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.checkpoint.checkpointer import Checkpointer, Saved
from dure.checkpoint.converting import convert
from dure.checkpoint.file_storages import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from dure.checkpoint.fsspec_path import FsspecPath
from dure.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dure.checkpoint.objects import PerRank
from dure.checkpoint.optimizer import load_sharded_optimizer_state_dict
from dure.checkpoint.plan_items import LoadPlan, ReadItem, SavePlan, WriteItem
from dure.checkpoint.planner import DefaultLoadPlanner, DefaultSavePlanner, LoadPlanner, SavePlanner
from dure.checkpoint.restoring import Loaded
from dure.checkpoint.sharded import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    load,
    load_state_dict,
    save,
    save_state_dict,
)
from dure.checkpoint.storage import StorageReader, StorageWriter
from dure.checkpoint.weight_folder import consolidate
from dure.errors import CheckpointException
from dure.torch_names import lazy_names

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
    "FsspecPath",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Loaded",
    "Metadata",
    "MetadataIndex",
    "PerRank",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "Saved",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "consolidate",
    "convert",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
]

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.checkpoint import (
        _nested_dict as _nested_dict, _traverse as _traverse, api as api,
        default_planner as default_planner, filesystem as filesystem, format_utils as format_utils,
        hf_storage as hf_storage, metadata as metadata, optimizer as optimizer, planner as planner,
        planner_helpers as planner_helpers, quantized_hf_storage as quantized_hf_storage,
        staging as staging, state_dict as state_dict, state_dict_loader as state_dict_loader,
        state_dict_saver as state_dict_saver, stateful as stateful, storage as storage,
        utils as utils,
    )
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)
