"""The parts of an optimizer's state: brought together on one rank, and taken apart again.

A state maps a parameter's number to a dictionary: ``{3: {"step": 7, "exp_avg": tensor}}``. Each
rank has the entries of the parameters that it owns. Large tensors are sent one by one, as they are;
the rest, with a note where each tensor belongs, is one pickled object a rank. So no rank holds more
than the state itself and one tensor.

A *full* state dictionary is that of an unsharded optimizer: its state has every parameter's entry.
An optimizer may keep more in it, under keys that are no numbers, of which each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.objects import gather_object

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["State", "by_number", "gather_state", "merged", "own_part"]

_SMALL_NUMEL = 1024

State = dict[int, dict[str, Any]]
"""Any: an optimizer's entries for a parameter, most of them tensors and numbers."""


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

    Collective:
        All ranks of the group, with the same `to`.

    Cost:
        One gather of a small object, and one message for each tensor of more than 1024 elements.
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
            group.send(tensor.detach().contiguous().to(_reached(group, tensor.device)), to)
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
    device = _reached(group, note.device)
    tensor = torch.empty(note.shape, dtype=note.dtype, device=device)
    group.recv(tensor, source)
    return tensor


def _reached(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return where a tensor is sent from: counts of steps are on the CPU, which NCCL lacks."""
    return device if device.type in group.device_types else group.message_device


def by_number(state_dict: dict[str, Any]) -> State:
    """Return the parameters' entries in a state dictionary."""
    return {k: v for k, v in state_dict["state"].items() if isinstance(k, int)}


def merged(own: dict[str, Any], parts: Sequence[State]) -> dict[str, Any]:
    """Make a full state dictionary of all ranks' parts and one rank's own."""
    besides = {k: v for k, v in own["state"].items() if not isinstance(k, int)}
    entries = chain.from_iterable(part.items() for part in parts)
    return {**own, "state": {n: dict(entry) for n, entry in sorted(entries)} | besides}


def own_part(full: dict[str, Any], keeps: Callable[[int | None], bool]) -> dict[str, Any]:
    """Return one rank's part of a full state dictionary.

    Args:
        full: Its parameters may have any keys; the order of its groups gives their numbers.
        keeps: Whether to keep a parameter's number, or None for an entry of no parameter,
            whether the rank keeps its entry.
    """
    saved = chain.from_iterable(group["params"] for group in full["param_groups"])
    number_of = {key: number for number, key in enumerate(saved)}
    state = {
        key: entry
        for key, entry in full["state"].items()
        if entry is not None and keeps(number_of.get(key))
    }
    return {**full, "state": state}
