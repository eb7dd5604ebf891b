"""The operations that move data without changing it, in the forms of torch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dure.torch_backend.calls import mode_of, only, root_of, slots
from dure.torch_backend.identity import TorchGroupBase
from dure.torch_backend.profiling import profiled
from dure.torch_private import c10d

__all__ = ["Moves"]

Tensors = Sequence[torch.Tensor]


class Moves(TorchGroupBase):
    """Operations that copy tensors between ranks. `opts` are torch's options."""

    @profiled("broadcast")
    def broadcast(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> c10d.Work:
        """Copy the only tensor of `tensors` from the root to all ranks."""
        mode = mode_of(opts, timeout)
        root = root_of(opts) if root is None else root
        return self._wrap(self.ours.broadcast(only(tensors, "broadcast"), root, mode[0]), mode)

    @profiled("all_gather", inputs=1)
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> c10d.Work:
        """Copy the only tensor of rank i's `inputs` to element i of the list in `outputs`."""
        mode = mode_of(opts, timeout)
        places = slots(outputs, "all_gather")
        work = self.ours.all_gather(places, only(inputs, "all_gather"), mode[0])
        return self._wrap(work, mode, [list(places)])

    @profiled("all_gather_into_tensor", inputs=1)
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> c10d.Work:
        """Copy `input` of rank i to part i of `output`."""
        mode = mode_of(opts)
        return self._wrap(self.ours.all_gather_single(output, input, mode[0]), mode)

    _allgather_base = all_gather_single

    @profiled("all_gather_into_tensor_coalesced", inputs=1)
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> c10d.Work:
        """Run `all_gather_single` for each pair."""
        mode = mode_of(opts)
        works = [
            self.ours.all_gather_single(o, i, async_op=True)
            for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._joined(works, list(outputs), mode)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @profiled("all_gather", inputs=1)
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> c10d.Work:
        """Run `allgather` for each of `inputs`; `output_lists[r]` gets the tensors of rank r."""
        mode = mode_of(opts)
        calls = list(zip(zip(*output_lists, strict=True), inputs, strict=True))
        works = [self.ours.all_gather(row, tensor, async_op=True) for row, tensor in calls]
        return self._joined(works, [t for row in output_lists for t in row], mode)

    @profiled("gather", inputs=1)
    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> c10d.Work:
        """Copy the only tensor of rank i's `inputs` to element i of the root's list."""
        mode = mode_of(opts, timeout)
        root = root_of(opts) if root is None else root
        places = slots(outputs, "gather") if outputs else None
        work = self.ours.gather(only(inputs, "gather"), places, root, mode[0])
        return self._wrap(work, mode, [list(places or ())])

    @profiled("scatter", inputs=1)
    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> c10d.Work:
        """Copy element i of the root's list to the only tensor of rank i's `outputs`."""
        mode = mode_of(opts, timeout)
        root = root_of(opts) if root is None else root
        places = slots(inputs, "scatter") if inputs else None
        return self._wrap(self.ours.scatter(only(outputs, "scatter"), places, root, mode[0]), mode)

    @profiled("all_to_all", inputs=1)
    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> c10d.Work:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
        mode = mode_of(opts, timeout)
        return self._wrap(self.ours.all_to_all(outputs, inputs, mode[0]), mode)

    @profiled("all_to_all", inputs=1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> c10d.Work:
        """Exchange rows of `input`, equal parts unless split sizes are given."""
        mode = mode_of(opts, timeout)
        work = self.ours.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, mode[0]
        )
        return self._wrap(work, mode)

    alltoall_base = all_to_all_single

    @profiled("barrier", inputs=None)
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> c10d.Work:
        """Wait for all ranks."""
        mode = mode_of(opts, timeout)
        return self._wrap(self.ours.barrier(mode[0]), mode)
