"""`PipelineStage`: one part of a model, with what its microbatches have left to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dure.comm.world import resolve
from dure.errors import UsageError
from dure.parallel.pipeline.backward import Edges, backward, edges_of, input_backward
from dure.parallel.pipeline.data_parallel import DataParallelStage
from dure.parallel.pipeline.layout import GetMesh, PackedPytree, pack, unpack
from dure.tensor.clipping import register_stage
from dure.torch_private import pytree

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["PipelineStage"]


class PipelineStage:
    """A part of a model that runs on this rank; its neighbours may run on others.

    What `submodule` returns is what the next stage's is called with: a tuple or list as its
    positional arguments, anything else as the only one. It may be nested, hold None and values that
    are not tensors, and differ in shape and dtype from microbatch to microbatch. A value that a
    later stage needs is handed through as one more output. Keyword arguments are not sent: each
    rank passes to `step` those that its stages need.

    Args:
        submodule: The part.
        stage_index: Its place in the model, from 0.
        num_stages: How many parts there are.
        device: Where it computes.
        input_args, output_args, output_grads, input_grads: Accepted; shapes travel with tensors.
        group: The ranks of the pipeline; the default group where None.
        dw_builder: For a module that computes its weights' gradients later: called after each
            backward, returns what computes them, where the schedule says W, or at once.
        get_mesh: ``get_mesh(axis names, None)`` returns the mesh on which this stage's inputs lie
            that were DTensors where they come from. None: it gets this rank's part of them.
        tied: Parameters of this stage that other stages have, too: a name that all of them use, and
            the parameter's path in `submodule`. They begin with the values of the earliest stage,
            and their gradients are summed when a step ends.

    Attributes:
        submod: The part.
        stage_index, num_stages, device, group, dw_builder, tied: As given.
        has_backward: Whether the running step has a backward.
        group_rank, group_size: This rank in the group, and how many there are.
        tied_holders: For each name in `tied` the group ranks that have it, the first stage first;
            set when a schedule makes its first step.
        loss_scale: Losses are multiplied by it before backward.

    Raises:
        UsageError: There is no such stage, or there are fewer stages than ranks.

    Example:
        ```python
        from dure import pipelining

        rank = dist.get_rank()
        part = torch.nn.Linear(4, 4)  # this rank's layers of the model
        stage = pipelining.PipelineStage(part, rank, num_stages=2, device=torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 4, torch.nn.functional.mse_loss)
        if rank == 0:
            schedule.step(torch.ones(8, 4))
        else:
            schedule.step(target=torch.zeros(8, 4))
        assert part.weight.grad is not None
        ```
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        group: ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMesh | None = None,
        *,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        del input_args, output_args, output_grads, input_grads
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.dw_builder, self.get_mesh = torch.device(device), dw_builder, get_mesh
        self.group = resolve(group, "PipelineStage")
        self.group_rank, self.group_size = self.group.rank(), self.group.size()
        if stage_index not in range(num_stages) or num_stages < self.group_size:
            raise UsageError(
                "there is no such stage",
                op="PipelineStage",
                seen=f"stage {stage_index} of {num_stages}, on {self.group_size} ranks",
                fix="Stages are numbered from 0, and there are at least as many as ranks.",
            )
        self.tied = dict(tied or {})
        self.tied_holders: dict[str, list[int]] = {}
        self.has_backward = False
        self.data_parallel = DataParallelStage(submodule)
        self.loss_scale = 1.0
        self._results: dict[int, Any] = {}
        self._inputs: dict[int, PackedPytree] = {}
        self._outbox: dict[int, PackedPytree] = {}
        self._edges: dict[int, Edges] = {}
        self._output_gradients: dict[int, Sequence[torch.Tensor | None]] = {}
        self._input_gradients: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._weights: dict[int, Callable[..., object]] = {}
        register_stage(self)

    def tied_ranks(self) -> list[tuple[nn.Parameter, Sequence[int]]]:
        """Return tied parameters, each with the global ranks that have it, the first stage first.

        Known once a schedule has made its first step.
        """
        ranks, get = self.group.global_ranks, self.submod.get_parameter
        holders = self.tied_holders.items()
        return [(get(self.tied[name]), [ranks[r] for r in group]) for name, group in holders]

    @property
    def is_first(self) -> bool:
        """Whether it gets the arguments of `step`."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its outputs are the model's."""
        return self.stage_index == self.num_stages - 1

    def __repr__(self) -> str:
        return (
            f"PipelineStage({self.stage_index} of {self.num_stages}, {type(self.submod).__name__})"
        )

    @property
    def output_chunks(self) -> list[Any]:
        """Of the last stage: the outputs of each microbatch, without graphs."""
        return [self._results[microbatch] for microbatch in sorted(self._results)]

    def clear_runtime_states(self) -> None:
        """Forget what an earlier step has left."""
        kept = (self._results, self._inputs, self._outbox, self._edges)
        for each in (*kept, self._output_gradients, self._input_gradients, self._weights):
            each.clear()

    # ---------------------------------------------------------------- forward

    def receive_forward(self, microbatch: int, packed: PackedPytree) -> None:
        """Take what the previous stage has returned: leaves from here on."""
        for tensor, leaf in zip(packed.tensors, packed.layout.tensors, strict=True):
            tensor.requires_grad_(leaf.requires_grad and self.has_backward)
        self._inputs[microbatch] = packed

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a microbatch.

        Args:
            fwd_chunk_id: Which one.
            args: Of the first stage; the others take what was received.
            kwargs: Of the microbatch.
            save_forward_output: Keep what the last stage returns.
        """
        if not self.is_first:
            args = unpack(self._inputs[fwd_chunk_id], self.get_mesh)
        with self.data_parallel.computing():
            output = self.submod(*args, **(kwargs or {}))
        if not self.is_last:
            packed = pack(_as_arguments(output))
            self._outbox[fwd_chunk_id] = packed.detached()
            if self.has_backward:
                self._edges[fwd_chunk_id] = edges_of(packed.tensors)
        elif save_forward_output:
            self._results[fwd_chunk_id] = pytree.tree_map(_detached, output)
        if not self.has_backward:
            self._inputs.pop(fwd_chunk_id, None)
        return output

    def take_outputs(self, microbatch: int) -> PackedPytree:
        """Return what is to go to the next stage."""
        return self._outbox.pop(microbatch)

    # ---------------------------------------------------------------- backward

    def receive_backward(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take gradients of this stage's outputs from the next stage."""
        self._output_gradients[microbatch] = gradients

    def take_gradients(self, microbatch: int) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of this stage's inputs, which are to go to the previous stage."""
        return self._input_gradients.pop(microbatch)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: torch.Tensor | None = None, full_backward: bool = True
    ) -> None:
        """Run the backward of a microbatch, or its first half.

        Args:
            bwd_chunk_id: Which one.
            loss: Of the last stage.
            full_backward: Not the gradients of inputs alone; see `backward_weight_one_chunk`.
        """
        if not self.has_backward:
            return
        inputs = self._inputs.pop(bwd_chunk_id).tensors if not self.is_first else []
        outputs, gradients = self._roots(bwd_chunk_id, loss)
        with self.data_parallel.computing():
            if self.dw_builder is None and not full_backward:
                found, rest = input_backward(outputs, gradients, inputs)
                self._weights[bwd_chunk_id] = rest
            else:
                found = backward(outputs, gradients, inputs)
                if self.dw_builder is not None:
                    self._weights[bwd_chunk_id] = self.dw_builder()
                    if full_backward:
                        self._weights.pop(bwd_chunk_id)()
        if not self.is_first:
            self._input_gradients[bwd_chunk_id] = tuple(found)

    def _roots(
        self, microbatch: int, loss: torch.Tensor | None
    ) -> tuple[Edges, Sequence[torch.Tensor | None]]:
        """Return where backward begins, and with which gradients."""
        if not self.is_last:
            return self._edges.pop(microbatch), self._output_gradients.pop(microbatch)
        if loss is None:
            return [], []
        return edges_of([loss]), [torch.full_like(loss, self.loss_scale)]

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None:
        """Run the second half of a microbatch's backward: the gradients of the weights."""
        if self.has_backward:
            with self.data_parallel.computing():
                self._weights.pop(bwd_chunk_id)()


def _as_arguments(output: Any) -> tuple[Any, ...]:
    """Return the arguments of the next stage."""
    if type(output) in (tuple, list):
        return tuple(output)
    return (output,)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
