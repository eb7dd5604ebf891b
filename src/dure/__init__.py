"""Dure: distributed training for PyTorch that shows which rank went wrong, and where.

`import dure as dist` gives the names, arguments and meaning of torch.distributed. The package
stays light: a public name is listed below with the module that is its one home, and that module is
imported when the name is first used (PEP 562). The launcher and the command line never load torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, cast

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.version": ("__version__",),
    "dure.errors": (
        "Aborted",
        "AxisError",
        "CheckpointDamaged",
        "CheckpointError",
        "CheckpointMismatch",
        "CheckpointException",
        "CheckpointNotWritten",
        "CheckpointTooNew",
        "CommError",
        "CommTimeout",
        "CopyError",
        "DataError",
        "Desync",
        "DeviceError",
        "DimError",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "DtypeError",
        "DureDeprecationWarning",
        "DureError",
        "DureWarning",
        "ForkWarning",
        "HookError",
        "InternalError",
        "LaunchError",
        "MeshError",
        "ModuleError",
        "NotInGroupError",
        "OptimizerError",
        "PeerLost",
        "PerformanceWarning",
        "PipelineError",
        "PlacementError",
        "QueueEmptyError",
        "RendezvousError",
        "RendezvousTimeout",
        "ReplicasDiffer",
        "RpcError",
        "ScheduleError",
        "ShapeError",
        "StoreError",
        "StoreLost",
        "StoreRefused",
        "StoreTimeout",
        "TorchVersionError",
        "UnevenInputs",
        "UnwaitedWorkWarning",
        "UsageError",
        "UsageWarning",
    ),
    "dure.errorfile": ("record",),
    "dure.store": ("EtcdStore", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    "dure.comm.ops": ("ReduceOp",),
    "dure.store.handlers": ("register_rendezvous_handler", "rendezvous"),
    "dure.comm.work": ("Work",),
    "dure.comm.world": ("GroupMember", "group"),
    "dure.comm.group": ("ProcessGroup",),
    "dure.comm.names": (
        "AllToAllOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "Backend",
        "BackendConfig",
        "BarrierOptions",
        "BroadcastOptions",
        "GatherOptions",
        "ProcessGroupGloo",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
        "supports_complex",
    ),
    "dure.comm.breakpoint": ("breakpoint",),
    "dure.comm.init": (
        "destroy_process_group",
        "init_process_group",
        "process_group",
    ),
    "dure.launch.functions": ("spawn",),
    "dure.comm.creation": ("default_pg_timeout",),
    "dure.comm.queries": (
        "DebugLevel",
        "get_backend",
        "get_backend_config",
        "get_debug_level",
        "get_default_backend_for_device",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "is_available",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "set_debug_level",
        "set_debug_level_from_env",
    ),
    "dure.comm.coalescing": ("coalescing_manager",),
    "dure.comm.collectives": (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "scatter",
    ),
    "dure.comm.memory": ("host_shared_empty", "shared_empty"),
    "dure.comm.monitored": ("monitored_barrier",),
    "dure.comm.point_to_point": ("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "dure.comm.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "dure.comm.subgroups": (
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    ),
    "dure.comm.shrinking": ("SHRINK_ABORT", "SHRINK_DEFAULT", "shrink", "shrink_group"),
    "dure.comm.aliases": (
        "_all_gather_base",
        "_coalescing_manager",
        "_get_default_group",
        "_rank_not_in_group",
        "_reduce_scatter_base",
        "all_gather_into_tensor",
        "reduce_op",
        "reduce_scatter_tensor",
    ),
    "dure.comm.backends.registry": ("known_backends", "register_backend"),
    "dure.mesh": ("DeviceMesh", "init_device_mesh"),
    "dure.data.loader": ("DataLoader",),
    "dure.data.partition": ("DataPartitioner", "Partition"),
    "dure.data.sampler": ("DistributedSampler",),
    "dure.parallel.batch_norm": ("SyncBatchNorm",),
    "dure.parallel.averaging": (
        "DiLoCo",
        "HierarchicalModelAverager",
        "ModelAverager",
        "PeriodicModelAverager",
        "PostLocalSGDOptimizer",
    ),
    "dure.training.join": ("Join", "JoinHook", "Joinable"),
    "dure.training.precision": ("MixedPrecision",),
    "dure.training.tokens": ("scale_by",),
    "dure.parallel": ("DistributedDataParallel", "GradBucket"),
    "dure.parallel.ddp.torch_names": (
        "BuiltinCommHookType",
        "_sync_module_states",
        "_verify_param_shape_across_processes",
    ),
    "dure.parallel.dp": ("DataParallel", "data_parallel"),
    "dure.parallel.optim": (
        "ZeroRedundancyOptimizer",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
    ),
    "dure.parallel.ddp.hooks": ("DDPCommHookType", "register_ddp_comm_hook"),
    "dure.parallel.ddp.hooks.default_hooks": (
        "allreduce_hook",
        "bf16_compress_hook",
        "bf16_compress_wrapper",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "noop_hook",
    ),
    "dure.parallel.ddp.hooks.post_localSGD_hook": ("PostLocalSGDState", "post_localSGD_hook"),
    "dure.parallel.ddp.hooks.powerSGD_hook": (
        "PowerSGDState",
        "batched_powerSGD_hook",
        "powerSGD_hook",
    ),
    "dure.parallel.ddp.hooks.quantization_hooks": (
        "quantization_perchannel_hook",
        "quantization_pertensor_hook",
    ),
    "dure.parallel.amp": ("GradScaler",),
    "dure.tensor.clipping": ("clip_grad_norm_",),
    "dure.trace.line": ("progress",),
    "dure.trace.publishing": ("log",),
    "dure.parallel.metrics": ("StepMeter", "StepReport", "StepSplit", "TensorBoardWriter"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from dure.comm.backends.torch_engine import ProcessGroupNCCL as ProcessGroupNCCL

    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure import (
        _composable as _composable, _functional_collectives as _functional_collectives,
        _state_dict_utils as _state_dict_utils, _symmetric_memory as _symmetric_memory,
        _tensor as _tensor, algorithms as algorithms, argparse_util as argparse_util,
        autograd as autograd, checkpoint as checkpoint, constants as constants, data as data,
        debug as debug, device_mesh as device_mesh, distributed_c10d as distributed_c10d,
        elastic as elastic, errors as errors, fsdp as fsdp, launch as launch, launcher as launcher,
        nn as nn, optim as optim, pipelining as pipelining, plan as plan,
        remote_device as remote_device, rpc as rpc, run as run, schedules as schedules,
        symmetric_memory as symmetric_memory, tensor as tensor, testing as testing,
        torch_backend as torch_backend, trace as trace, utils as utils,
    )
    from dure.comm.aliases import all_gather_into_tensor, reduce_op, reduce_scatter_tensor
    from dure.comm.aliases import (
        _all_gather_base as _all_gather_base,  # pyright: ignore[reportPrivateUsage]
        _coalescing_manager as _coalescing_manager,  # pyright: ignore[reportPrivateUsage]
        _get_default_group as _get_default_group,  # pyright: ignore[reportPrivateUsage]
        _rank_not_in_group as _rank_not_in_group,  # pyright: ignore[reportPrivateUsage]
        _reduce_scatter_base as _reduce_scatter_base,  # pyright: ignore[reportPrivateUsage]
    )
    from dure.comm.backends.registry import known_backends, register_backend
    from dure.comm.breakpoint import breakpoint
    from dure.comm.coalescing import coalescing_manager
    from dure.comm.collectives import (
        all_gather, all_gather_coalesced, all_gather_single, all_reduce, all_reduce_coalesced,
        all_to_all, all_to_all_single, barrier, broadcast, gather, reduce, reduce_scatter,
        reduce_scatter_single, scatter,
    )
    from dure.comm.creation import default_pg_timeout
    from dure.comm.group import ProcessGroup
    from dure.comm.init import destroy_process_group, init_process_group, process_group
    from dure.comm.memory import host_shared_empty, shared_empty
    from dure.comm.monitored import monitored_barrier
    from dure.comm.names import (
        AllToAllOptions, AllreduceCoalescedOptions, AllreduceOptions, Backend, BackendConfig,
        BarrierOptions, BroadcastOptions, GatherOptions, ProcessGroupGloo, ReduceOptions,
        ReduceScatterOptions, ScatterOptions, supports_complex,
    )
    from dure.comm.objects import (
        all_gather_object, broadcast_object_list, gather_object, recv_object_list,
        scatter_object_list, send_object_list,
    )
    from dure.comm.ops import ReduceOp
    from dure.comm.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from dure.comm.queries import (
        DebugLevel, get_backend, get_backend_config, get_debug_level,
        get_default_backend_for_device, get_global_rank, get_group_rank, get_node_local_rank,
        get_pg_count, get_process_group_ranks, get_rank, get_world_size, is_available,
        is_backend_available, is_gloo_available, is_initialized, is_mpi_available,
        is_nccl_available, is_torchelastic_launched, is_ucc_available, is_xccl_available,
        set_debug_level, set_debug_level_from_env,
    )
    from dure.comm.shrinking import SHRINK_ABORT, SHRINK_DEFAULT, shrink, shrink_group
    from dure.comm.subgroups import (
        new_group, new_subgroups, new_subgroups_by_enumeration, split_group,
    )
    from dure.comm.work import Work
    from dure.comm.world import GroupMember, group
    from dure.data.loader import DataLoader
    from dure.data.partition import DataPartitioner, Partition
    from dure.data.sampler import DistributedSampler
    from dure.errorfile import record
    from dure.errors import (
        Aborted, AxisError, CheckpointDamaged, CheckpointError, CheckpointException,
        CheckpointMismatch, CheckpointNotWritten, CheckpointTooNew, CommError, CommTimeout,
        CopyError, DataError, Desync, DeviceError, DimError, DistBackendError, DistError,
        DistNetworkError, DistStoreError, DtypeError, DureDeprecationWarning, DureError,
        DureWarning, ForkWarning, HookError, InternalError, LaunchError, MeshError, ModuleError,
        NotInGroupError, OptimizerError, PeerLost, PerformanceWarning, PipelineError,
        PlacementError, QueueEmptyError, RendezvousError, RendezvousTimeout, ReplicasDiffer,
        RpcError, ScheduleError, ShapeError, StoreError, StoreLost, StoreRefused, StoreTimeout,
        TorchVersionError, UnevenInputs, UnwaitedWorkWarning, UsageError, UsageWarning,
    )
    from dure.launch.functions import spawn
    from dure.mesh import DeviceMesh, init_device_mesh
    from dure.parallel import DistributedDataParallel, GradBucket
    from dure.parallel.amp import GradScaler
    from dure.parallel.averaging import (
        DiLoCo, HierarchicalModelAverager, ModelAverager, PeriodicModelAverager,
        PostLocalSGDOptimizer,
    )
    from dure.parallel.batch_norm import SyncBatchNorm
    from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
    from dure.parallel.ddp.hooks.default_hooks import (
        allreduce_hook, bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook,
        fp16_compress_wrapper, noop_hook,
    )
    from dure.parallel.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from dure.parallel.ddp.hooks.powerSGD_hook import (
        PowerSGDState, batched_powerSGD_hook, powerSGD_hook,
    )
    from dure.parallel.ddp.hooks.quantization_hooks import (
        quantization_perchannel_hook, quantization_pertensor_hook,
    )
    from dure.parallel.ddp.torch_names import BuiltinCommHookType
    from dure.parallel.ddp.torch_names import (
        _sync_module_states as _sync_module_states,  # pyright: ignore[reportPrivateUsage]
        _verify_param_shape_across_processes as _verify_param_shape_across_processes,  # pyright: ignore[reportPrivateUsage]
    )
    from dure.parallel.dp import DataParallel, data_parallel
    from dure.parallel.metrics import StepMeter, StepReport, StepSplit, TensorBoardWriter
    from dure.parallel.optim import (
        ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved,
    )
    from dure.store import EtcdStore, FileStore, HashStore, PrefixStore, Store, TCPStore
    from dure.store.handlers import register_rendezvous_handler, rendezvous
    from dure.tensor.clipping import clip_grad_norm_
    from dure.trace.line import progress
    from dure.trace.publishing import log
    from dure.training.join import Join, JoinHook, Joinable
    from dure.training.precision import MixedPrecision
    from dure.training.tokens import scale_by
    from dure.version import (
        __version__ as __version__,  # pyright: ignore[reportPrivateUsage]
    )
    __all__ = [
        "SHRINK_ABORT", "SHRINK_DEFAULT", "Aborted", "AllToAllOptions",
        "AllreduceCoalescedOptions", "AllreduceOptions", "AxisError", "Backend", "BackendConfig",
        "BarrierOptions", "BroadcastOptions", "BuiltinCommHookType", "CheckpointDamaged",
        "CheckpointError", "CheckpointException", "CheckpointMismatch", "CheckpointNotWritten",
        "CheckpointTooNew", "CommError", "CommTimeout", "CopyError", "DDPCommHookType",
        "DataError", "DataLoader", "DataParallel", "DataPartitioner", "DebugLevel", "Desync",
        "DeviceError", "DeviceMesh", "DiLoCo", "DimError", "DistBackendError", "DistError",
        "DistNetworkError", "DistStoreError", "DistributedDataParallel", "DistributedSampler",
        "DtypeError", "DureDeprecationWarning", "DureError", "DureWarning", "EtcdStore",
        "FileStore", "ForkWarning", "GatherOptions", "GradBucket", "GradScaler", "GroupMember",
        "HashStore", "HierarchicalModelAverager", "HookError", "InternalError", "Join", "JoinHook",
        "Joinable", "LaunchError", "MeshError", "MixedPrecision", "ModelAverager", "ModuleError",
        "NotInGroupError", "OptimizerError", "P2POp", "Partition", "PeerLost",
        "PerformanceWarning", "PeriodicModelAverager", "PipelineError", "PlacementError",
        "PostLocalSGDOptimizer", "PostLocalSGDState", "PowerSGDState", "PrefixStore",
        "ProcessGroup", "ProcessGroupGloo", "QueueEmptyError", "ReduceOp", "ReduceOptions",
        "ReduceScatterOptions", "RendezvousError", "RendezvousTimeout", "ReplicasDiffer",
        "RpcError", "ScatterOptions", "ScheduleError", "ShapeError", "StepMeter", "StepReport",
        "StepSplit", "Store", "StoreError", "StoreLost", "StoreRefused", "StoreTimeout",
        "SyncBatchNorm", "TCPStore", "TensorBoardWriter", "TorchVersionError", "UnevenInputs",
        "UnwaitedWorkWarning", "UsageError", "UsageWarning", "Work", "ZeroRedundancyOptimizer",
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
        "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all",
        "all_to_all_single", "allreduce_hook", "barrier", "batch_isend_irecv",
        "batched_powerSGD_hook", "bf16_compress_hook", "bf16_compress_wrapper", "breakpoint",
        "broadcast", "broadcast_object_list", "clip_grad_norm_", "coalescing_manager",
        "data_parallel", "default_pg_timeout", "destroy_process_group", "fp16_compress_hook",
        "fp16_compress_wrapper", "gather", "gather_object", "get_backend", "get_backend_config",
        "get_debug_level", "get_default_backend_for_device", "get_global_rank", "get_group_rank",
        "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
        "get_world_size", "group", "hook_with_zero_step", "hook_with_zero_step_interleaved",
        "host_shared_empty", "init_device_mesh", "init_process_group", "irecv", "is_available",
        "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available",
        "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available",
        "isend", "known_backends", "log", "monitored_barrier", "new_group", "new_subgroups",
        "new_subgroups_by_enumeration", "noop_hook", "post_localSGD_hook", "powerSGD_hook",
        "process_group", "progress", "quantization_perchannel_hook", "quantization_pertensor_hook",
        "record", "recv", "recv_object_list", "reduce", "reduce_op", "reduce_scatter",
        "reduce_scatter_single", "reduce_scatter_tensor", "register_backend",
        "register_ddp_comm_hook", "register_rendezvous_handler", "rendezvous", "scale_by",
        "scatter", "scatter_object_list", "send", "send_object_list", "set_debug_level",
        "set_debug_level_from_env", "shared_empty", "shrink", "shrink_group", "spawn",
        "split_group", "supports_complex",
    ]
    # isort: on
    # fmt: on
else:
    __all__ = [name for name in _HOME_OF if not name.startswith("_")]

    def __getattr__(name: str) -> Any:
        """Import the home of a public name, or a submodule, on its first use."""
        module = _HOME_OF.get(name)
        if module is None:
            if name == "ProcessGroupNCCL":  # for its Options
                found = importlib.import_module("dure.comm.backends.torch_engine").ProcessGroupNCCL
                if found is not None:
                    return found
            from dure.torch_names import attribute  # lazy: most programs have no other names

            return attribute("dure", name)
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        from dure.torch_names import names_of  # lazy: most programs do not call it

        return names_of("dure")


def _read_warning_options() -> None:
    """Apply `python -W error::dure.DureWarning`: Python reads -W before it can find packages.

    The filters go where Python would have put them: after those that the program has added since,
    and before Python's defaults, the first of which is the only one with the module "__main__".
    """
    options: list[str] = sys.warnoptions
    if not any(":dure." in option for option in options):
        return
    import warnings  # lazy: most programs have no such option

    filters = cast(list[Any], warnings.filters)
    begin = end = next((n for n, f in enumerate(filters) if f[3] == "__main__"), len(filters))
    with warnings.catch_warnings():  # `filters` applies again when the block ends
        warnings.resetwarnings()
        warnings._processoptions(options)  # pyright: ignore
        read = [*warnings.filters]
        while begin and filters[begin - 1] in read:
            begin -= 1
        filters[begin:end] = [entry for entry in read if entry not in filters[:begin]]


_read_warning_options()
