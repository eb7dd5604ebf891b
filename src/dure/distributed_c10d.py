"""torch's path `torch.distributed.distributed_c10d`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure import (
    AllToAllOptions, AllreduceCoalescedOptions, AllreduceOptions, Backend, BackendConfig,
    BarrierOptions, BroadcastOptions, DebugLevel, DistBackendError, DistError, DistNetworkError,
    DistStoreError, FileStore, GatherOptions, GroupMember, HashStore, P2POp, PrefixStore,
    ProcessGroup, ProcessGroupGloo, QueueEmptyError, ReduceOp, ReduceOptions, ReduceScatterOptions,
    ScatterOptions, Store, TCPStore, Work, _all_gather_base, _coalescing_manager,
    _get_default_group, _rank_not_in_group, _reduce_scatter_base, all_gather, all_gather_coalesced,
    all_gather_into_tensor, all_gather_object, all_gather_single, all_reduce, all_reduce_coalesced,
    all_to_all, all_to_all_single, barrier, batch_isend_irecv, broadcast, broadcast_object_list,
    default_pg_timeout, destroy_process_group, gather, gather_object, get_backend,
    get_backend_config, get_debug_level, get_default_backend_for_device, get_global_rank,
    get_group_rank, get_node_local_rank, get_pg_count, get_process_group_ranks, get_rank,
    get_world_size, group, init_process_group, irecv, is_available, is_backend_available,
    is_gloo_available, is_initialized, is_mpi_available, is_nccl_available,
    is_torchelastic_launched, is_ucc_available, is_xccl_available, isend, monitored_barrier,
    new_group, new_subgroups, new_subgroups_by_enumeration, recv, recv_object_list, reduce,
    reduce_op, reduce_scatter, reduce_scatter_single, reduce_scatter_tensor, scatter,
    scatter_object_list, send, send_object_list, shrink_group, split_group, supports_complex
)
from dure.store.handlers import register_rendezvous_handler, rendezvous
from dure.comm.aliases import (
    _get_default_store, _get_pg_default_device, _get_process_group_name, _resolve_process_group,
    _set_pg_timeout, _world
)
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "Backend", "BackendConfig",
    "BarrierOptions", "BroadcastOptions", "DebugLevel", "DistBackendError", "DistError",
    "DistNetworkError", "DistStoreError", "FileStore", "GatherOptions", "GroupMember", "HashStore",
    "P2POp", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "QueueEmptyError", "ReduceOp",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "Store", "TCPStore", "Work",
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "default_pg_timeout",
    "destroy_process_group", "gather", "gather_object", "get_backend", "get_backend_config",
    "get_debug_level", "get_default_backend_for_device", "get_global_rank", "get_group_rank",
    "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size",
    "group", "init_process_group", "irecv", "is_available", "is_backend_available",
    "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
    "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "recv",
    "recv_object_list", "reduce", "reduce_op", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "register_rendezvous_handler", "rendezvous", "scatter",
    "scatter_object_list", "send", "send_object_list", "shrink_group", "split_group",
    "supports_complex"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
