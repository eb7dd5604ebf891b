"""torch's path `torch.distributed._functional_collectives`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.comm.functional import (
    AsyncCollectiveTensor, all_gather_into_tensor_coalesced, all_gather_single,
    all_gather_single_autograd, all_gather_single_coalesced, all_gather_tensor,
    all_gather_tensor_autograd, all_reduce, all_reduce_coalesced, all_to_all_single,
    all_to_all_single_autograd, broadcast, permute_tensor, reduce_scatter_single,
    reduce_scatter_single_autograd, reduce_scatter_single_coalesced, reduce_scatter_tensor,
    reduce_scatter_tensor_autograd, reduce_scatter_tensor_coalesced, wait_tensor
)
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "AsyncCollectiveTensor", "all_gather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_autograd", "all_gather_single_coalesced", "all_gather_tensor",
    "all_gather_tensor_autograd", "all_reduce", "all_reduce_coalesced", "all_to_all_single",
    "all_to_all_single_autograd", "broadcast", "permute_tensor", "reduce_scatter_single",
    "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd", "reduce_scatter_tensor_coalesced", "wait_tensor"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
