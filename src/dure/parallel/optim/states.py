"""The parts of an optimizer's state, brought together on one rank.

A state maps a parameter's number to a dictionary: ``{3: {"step": 7, "exp_avg": tensor}}``. Each
rank has the entries of the parameters that it owns. Large tensors are sent one by one, as they are;
the rest, with a note where each tensor belongs, is one pickled object a rank. So no rank holds more
than the state itself and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.objects import gather_object

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["State", "gather_state"]

_SMALL_NUMEL = 1024

State = dict[int, dict[str, Any]]
"""Any: what optimizers keep for a parameter, most of it tensors and numbers."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _is_sent(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.numel() > _SMALL_NUMEL
    )


def _places(state: State) -> Iterator[tuple[dict[str, Any], str]]:
    """Go through all values of a state, in an order that sender and receiver share."""
    return ((entry, key) for number in sorted(state) for entry in [state[number]] for key in entry)


def gather_state(group: ProcessGroup, mine: State, to: int) -> list[State] | None:
    """Bring all ranks' states to one rank.

    Args:
        group: The ranks.
        mine: This rank's part; tensors in it are not changed.
        to: Group rank that gets all parts.

    Returns:
        On `to`: the parts by rank, on the CPU, its own copied. None elsewhere.

    Collective: all ranks of the group, with the same `to`.
    Cost: one gather of a small object, and one message for each tensor of more than 1024 elements.
    """
    outline = {number: dict(entry) for number, entry in mine.items()}
    tensors: list[torch.Tensor] = []
    for entry, key in _places(outline):
        value = entry[key]
        if _is_sent(value):
            tensors.append(value)
            entry[key] = _Tensor(tuple(value.shape), value.dtype, value.device)
    at_root = group.rank() == to
    outlines: list[State] | None = [{} for _ in range(group.size())] if at_root else None
    gather_object(outline, outlines, group=group, group_dst=to)
    if outlines is None:
        for tensor in tensors:
            group.send(tensor.detach().contiguous(), to)
        return None
    for source, part in enumerate(outlines):
        for entry, key in _places(part):
            note = entry[key]
            if isinstance(note, _Tensor):
                entry[key] = (
                    tensors.pop(0).clone() if source == to else _received(group, note, source)
                )
            if isinstance(entry[key], torch.Tensor):
                entry[key] = entry[key].detach().cpu()
    return outlines


def _received(group: ProcessGroup, note: _Tensor, source: int) -> torch.Tensor:
    tensor = torch.empty(note.shape, dtype=note.dtype, device=note.device)
    group.recv(tensor, source)
    return tensor
