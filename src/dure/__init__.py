"""Dure: distributed PyTorch that you can see through.

`import dure as dist` gives the names, arguments and meaning of torch.distributed. The package
stays light: a public name is listed below with the module that is its one home, and that module is
imported when the name is first used (PEP 562). The launcher and the command line never load torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
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
        "coalescing_manager",
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

__all__ = [n for n in _HOME_OF if not n.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]


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
    return sorted({*globals(), *__all__})


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
