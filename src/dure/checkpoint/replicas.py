"""Comparing what ranks save under the same name.

A checkpoint stores once what several ranks have under one name. If they have different things there
(pipeline stages that are all called ``model``, a head per rank), all but one would be lost. So
ranks are compared, in the exchange that a save makes anyway:

- names, shapes and dtypes, with what each rank offers (`planning`);
- values that are not tensors, with the trees (`tree.merged`);
- tensors by *marks*: the checksum of up to 32 elements, evenly spaced. Two copies of one tensor
  have equal marks; different weights, or moments of different weights, do not.

A `ReplicaRule` specifies for each entry of a state what must be equal. If an entry may differ, the
lowest rank's is saved. A DTensor whose mesh has all ranks that save has no mark: its copies are
equal by contract. On other meshes (sharded pipeline stages) one name may refer to different
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import nn

from dure.checkpoint.names import Names
from dure.checkpoint.objects import bare, few
from dure.checkpoint.slices import pieces_of
from dure.checkpoint.tree import ABSENT, Keys, flatten
from dure.errors import CheckpointMismatch, UsageError
from dure.tensor import DTensor

__all__ = [
    "ALIKE",
    "LOWEST",
    "MARKED",
    "ReplicaRule",
    "TreeDifference",
    "different",
    "handling",
    "marks_by_name",
    "marks_of",
    "require_alike",
    "require_common",
    "rule_of",
]

MARKED, ALIKE, LOWEST = 1, 2, 4
"""How a tensor is handled. MARKED: its mark is sent. ALIKE: it must be equal on all ranks that have
it. LOWEST: the lowest rank that has it writes it, instead of the one with the least to write."""

_EXTRA = "_extra_state"  # the end of its key in a module's state
_NUM_SAMPLED = 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIX = (
    "Use a separate name for what differs between ranks, such as f'model{stage}', or wrap it in "
    "PerRank (Checkpointer, for objects without DTensors). For the optimizers of pipeline stages, "
    "use get_optimizer_state_dict with StateDictOptions(flatten_optimizer_state_dict=True)."
)


@dataclass(frozen=True, slots=True)
class ReplicaRule:
    """What ranks must have in common of one entry of a state."""

    keys: bool = False
    """Whether the names below it must be the same."""
    values: bool = False
    """Whether the values and tensors must be equal."""
    free: frozenset[str] = frozenset()
    """Names below it that may differ."""
    lowest: bool = False
    """Whether the lowest rank that has its plain tensors writes them."""

    def exempts(self, name: str) -> bool:
        """Return whether a name, or one above it, may differ."""
        return bool(self.free) and any(name[:end] in self.free for end in (len(name), *_dots(name)))


def _dots(name: str) -> Iterable[int]:
    return (at for at, char in enumerate(name) if char == ".")


def rule_of(key: Any, value: Any, state: Any) -> ReplicaRule:
    """Return the rule of an object that is saved under `key`, and has this state.

    Parameters of a module and the state of an optimizer must be equal. Buffers and extra state of a
    module may differ, as under DistributedDataParallel, and so may values in a dict. A module may
    return parameters under other names (`state_dict` hooks); they must be equal, too.
    """
    inner = bare(value)
    if isinstance(inner, torch.optim.Optimizer):
        return ReplicaRule(values=True)
    if not isinstance(inner, nn.Module):
        return ReplicaRule()
    names = Names(inner)
    parameters = {name for places in names.of_parameter.values() for name in places}
    name_of = {k: names.of_key(k) for k in state}
    others = [k for k, name in name_of.items() if name not in parameters]
    if not parameters <= set(name_of.values()):
        # The module has left parameters out, or has given them other names, which are among these.
        free = {k for k in others if k.endswith(_EXTRA) or name_of[k] in names.of_buffers}
        buffers = {_memory_of(buffer) for buffer in inner.buffers()} - {None}
        others = [k for k in others if k in free or _memory_of(state[k]) in buffers]
    return ReplicaRule(values=True, free=frozenset(f"{key}.{k}" for k in others))


def _memory_of(value: Any) -> Any:
    """Return the address of a tensor's storage; None for values that have none."""
    if not isinstance(value, torch.Tensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.layout != torch.strided:
        return None
    try:
        return local.untyped_storage().data_ptr()
    except RuntimeError:  # NotImplementedError, too: a subclass without memory
        return None


def handling(
    name: str,
    tensor: torch.Tensor,
    rule: ReplicaRule,
    ranks: frozenset[int],
    is_everywhere: dict[int, bool],
) -> int:
    """Return how a tensor is handled: MARKED, ALIKE and LOWEST, added.

    Args:
        name: Its name.
        tensor: The tensor.
        rule: The rule of the entry that it is in.
        ranks: The global ranks that save.
        is_everywhere: Whether a mesh, by `id`, has all of them; filled here, for one save.
    """
    if len(ranks) == 1:
        return 0
    free = rule.exempts(name)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        everywhere = is_everywhere.get(id(mesh))
        if everywhere is None:
            inside = mesh.get_coordinate() is not None and mesh.size() >= len(ranks)
            everywhere = inside and ranks.issubset(mesh.mesh.view(-1).tolist())
            is_everywhere[id(mesh)] = everywhere
        return 0 if everywhere else MARKED if free else MARKED | ALIKE
    if free:
        return LOWEST
    return MARKED | (ALIKE if rule.values else 0) | (LOWEST if rule.lowest else 0)


def marks_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the mark of each tensor, 4 bytes each.

    Cost:
        32 elements of each are read; for those that are not on the CPU, one copy per dtype.
    """
    marks = np.zeros(len(tensors), np.uint32)
    sampled: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        some = _sample(tensor)
        sampled.setdefault((some.dtype, some.device), []).append((number, some))
    for (dtype, _), found in sampled.items():
        every = torch.cat([some for _, some in found]).cpu()
        data = memoryview(cast(Any, every.view(torch.uint8).numpy()))
        at = 0
        for number, some in found:
            end = at + some.numel() * dtype.itemsize
            marks[number] = crc32(data[at:end])
            at = end
    return marks.tobytes()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements of a tensor, as integers of the same bits, in one dimension."""
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = bits.view(_INTEGERS[bits.dtype.itemsize])
    if bits.numel() <= _NUM_SAMPLED:
        return bits.reshape(-1)
    return torch.take(bits, _places(bits.numel(), bits.device))


@lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> torch.Tensor:
    every = (
        torch.arange(_NUM_SAMPLED, dtype=torch.int64, device="cpu")
        * (count - 1)
        // (_NUM_SAMPLED - 1)
    )
    return every.to(device)


def marks_by_name(
    state_dict: Mapping[Any, Any], state: Mapping[Any, Any], ranks: frozenset[int]
) -> dict[str, int]:
    """Return marks of what must be equal on all ranks, where a planner decides what is saved.

    Args:
        state_dict: Objects by key.
        state: Their states.
        ranks: The global ranks that save.
    """
    if len(ranks) == 1:
        return {}
    rules = {str(key): rule_of(key, value, state[key]) for key, value in state_dict.items()}
    found: dict[str, int] = {}
    pieces: dict[str, torch.Tensor] = {}
    is_everywhere: dict[int, bool] = {}
    for name, leaf in flatten(state).items():
        rule = rules[str(leaf.path[0])]
        if not isinstance(leaf.value, torch.Tensor):
            if rule.values and not rule.exempts(name):
                found[name] = crc32(repr(leaf.value).encode())
        elif handling(name, leaf.value, rule, ranks, is_everywhere) & ALIKE:
            with suppress(UsageError):  # the planner deals with tensors that have no slices
                pieces |= {f"{name}{p.box}": p.memory for p in pieces_of(name, leaf.value)}
    marks = np.frombuffer(marks_of(list(pieces.values())), np.uint32).tolist()
    return found | dict(zip(pieces, marks, strict=True))


def require_alike(marks: Sequence[Mapping[str, int]]) -> None:
    """Compare what `marks_by_name` returned on each rank.

    Raises:
        CheckpointMismatch: Ranks differ.
    """
    first: dict[str, tuple[int, int]] = {}
    wrong: list[str] = []
    for rank, those in enumerate(marks):
        for name, mark in those.items():
            lowest, its = first.setdefault(name, (rank, mark))
            if mark != its:
                wrong.append(f"{name} of rank {rank} differs from that of rank {lowest}")
    if wrong:
        raise different(wrong)


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """One entry at which two ranks differ."""

    rank: int
    """The higher of the two."""
    keys: Keys
    first: Any
    """The node of a lower rank."""
    second: Any

    @property
    def name(self) -> str:
        """The name of the entry."""
        return ".".join(self.keys)

    def __str__(self) -> str:
        """Return what each rank has."""
        if self.first is ABSENT:
            return f"{self.name} is on rank {self.rank}, but not on lower ranks"
        if self.second is ABSENT:
            return f"{self.name} is not on rank {self.rank}"
        second, first = f"{self.second!r:.40}", f"{self.first!r:.40}"
        return f"{self.name} is {second} on rank {self.rank}, {first} on a lower rank"


def require_common(
    differences: Iterable[TreeDifference], rules: Sequence[Mapping[str, ReplicaRule]]
) -> list[TreeDifference]:
    """Refuse differences that are not allowed; return those of values that are.

    Args:
        differences: Between the trees of ranks.
        rules: The requirements of each rank, by the first key.

    Raises:
        CheckpointMismatch: Names or values differ.
    """
    wrong: list[TreeDifference] = []
    allowed: list[TreeDifference] = []
    rules_of: dict[str, set[ReplicaRule]] = {}
    for rank_rules in rules:
        for key, rule in rank_rules.items():
            rules_of.setdefault(key, set()).add(rule)
    for found in differences:
        those = rules_of.get(found.keys[0], set())
        names = ABSENT in (found.first, found.second)
        if names and (len(found.keys) == 1 or not any(rule.keys for rule in those)):
            continue
        free = any(rule.exempts(found.name) for rule in those)
        must = any(rule.keys if names else rule.values and not free for rule in those)
        # Options are kept by group: those of another rank's parameters would be lost.
        must |= found.keys[-3::2] == ("param_groups", "params")
        (wrong if must else allowed).append(found)
    if wrong:
        raise different([str(found) for found in wrong])
    return allowed


def different(seen: Sequence[str]) -> CheckpointMismatch:
    """Return the error that says where ranks differ."""
    return CheckpointMismatch(
        "ranks have different objects under one name, and only one of them would be saved",
        seen=few(list(seen), "; "),
        fix=_FIX,
    )
