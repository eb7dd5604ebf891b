"""The mean of many tensors over ranks, in few large all_reduces.

Tensors of one dtype and device are laid end to end in *pieces* of up to 32 MiB. While one piece is
reduced the next is being packed, so the extra memory is two pieces for any model size, and
a model's many small tensors do not pay the fixed cost of a collective each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.ops import ReduceOp
from dure.comm.world import resolve
from dure.errors import UsageError
from dure.training.flat_buffers import by_kind, packed, unpack

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work

__all__ = [
    "Parameters",
    "average_",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

PIECE_BYTES = 32 << 20
_IN_FLIGHT = 2

Parameters = Iterable[torch.nn.Parameter] | Iterable[Mapping[str, Any]]
"""Parameters of a model, or an optimizer's parameter groups."""


def average_(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, dtype: torch.dtype | None = None
) -> None:
    """Overwrite `tensors` with their mean over the ranks of `group`.

    Args:
        tensors: Of any shapes, dtypes and devices, the same on all ranks.
        group: The ranks.
        dtype: Of messages, if not the tensors' own dtype: bfloat16 halves the bytes of float32.

    Collective:
        All ranks of the group.

    Cost:
        S bytes in one all_reduce for each 32 MiB of each dtype; two pieces of extra memory.

    Numerics:
        Bitwise the same on all ranks.
    """
    flying: deque[tuple[Work | None, torch.Tensor, list[torch.Tensor]]] = deque()
    with torch.no_grad():
        for piece in _pieces(tensors):
            flat = packed(piece)
            flat = flat if dtype is None else flat.to(dtype)
            work = group.all_reduce(flat, ReduceOp.AVG, async_op=True)
            if work is not None:
                work.disown()  # not waited for where an earlier one fails
            flying.append((work, flat, piece))
            if len(flying) == _IN_FLIGHT:
                _copy_back(*flying.popleft())
        while flying:
            _copy_back(*flying.popleft())


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Divide tensors into pieces: of one dtype and device each, in their order."""
    for same_kind in by_kind(tensors).values():
        piece: list[torch.Tensor] = []
        filled = 0
        for tensor in same_kind:
            num_bytes = tensor.numel() * tensor.element_size()
            if piece and filled + num_bytes > PIECE_BYTES:
                yield piece
                piece, filled = [], 0
            piece.append(tensor)
            filled += num_bytes
        yield piece


def _copy_back(work: Work | None, flat: torch.Tensor, piece: list[torch.Tensor]) -> None:
    """Wait for a piece, and copy the means to where they belong."""
    if work is not None:
        work.wait()
    unpack(flat, piece)


def get_params_to_average(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient: those that training changes.

    Args:
        params: A model's parameters, or an optimizer's parameter groups.

    Returns:
        The parameters, in their order.

    Raises:
        UsageError: Something among them is neither.

    Example:
        ```python
        from dure.algorithms.model_averaging import utils

        model = torch.nn.Linear(2, 1)
        assert utils.get_params_to_average(model.parameters()) == []
        model(torch.ones(1, 2)).sum().backward()
        assert len(utils.get_params_to_average(model.parameters())) == 2
        ```
    """
    found: list[torch.nn.Parameter] = []
    for item in params:
        if isinstance(item, torch.nn.Parameter):
            found.append(item)
        elif isinstance(item, Mapping):
            found += item["params"]
        else:
            raise UsageError(
                "only parameters and parameter groups can be averaged",
                seen=f"a {type(item).__name__}",
                fix="Give model.parameters() or optimizer.param_groups.",
            )
    return [p for p in found if p.grad is not None]


def average_parameters(
    params: Iterable[torch.nn.Parameter], process_group: ProcessGroup | None = None
) -> None:
    """Overwrite parameters, in place, with their mean over the ranks; as `average_`.

    Args:
        params: The parameters.
        process_group: The ranks; the default group if None.

    Collective:
        All ranks of the group.

    Example:
        ```python
        weight = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
        utils.average_parameters([weight])
        assert weight.item() == 0.5  # of 0 and 1
        ```
    """
    average_(list(params), resolve(process_group, "average_parameters"))


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: ProcessGroup | None = None
) -> None:
    """Do the same for those that have a gradient, of a model or of an optimizer's groups.

    Args:
        params: A model's parameters, or an optimizer's parameter groups.
        process_group: The ranks; the default group if None.

    Collective:
        All ranks of the group.

    Example:
        ```python
        weight = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
        weight.grad = torch.ones(1)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        utils.average_parameters_or_parameter_groups(optimizer.param_groups)
        assert weight.item() == 0.5
        ```
    """
    average_parameters(get_params_to_average(params), process_group)
