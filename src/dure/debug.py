"""Checks for debugging a training program.

`check_replicas(model)`, called after every step, finds the first parameter that differs between
ranks that must have the same values: its gradient was reduced over too few ranks, say, or a random
number was drawn with another seed, or a weight was loaded on one rank only. `check_batch(batch,
mesh)` compares the batches of ranks that must read the same data.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.group import ProcessGroup
from dure.comm.objects import all_gather_object
from dure.comm.world import resolve
from dure.data.sampler import DATA_AXES
from dure.errors import ReplicasDiffer
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor
from dure.torch_names import lazy_names
from dure.torch_private import pytree

__all__ = ["check_batch", "check_replicas"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)


def check_replicas(
    model: torch.nn.Module, *, step: int | None = None, group: ProcessGroup | None = None
) -> None:
    """Raise on all ranks if replicas of a parameter or buffer differ.

    A plain tensor must be the same on all ranks of `group`. A DTensor must be the same on ranks of
    its mesh that hold the same shard.

    Args:
        model: The module; its parameters and buffers have the same names on all ranks.
        step: Number of the step, for the error message.
        group: The ranks to compare; None for the default group.

    Raises:
        ReplicasDiffer: Has the name of the first parameter that differs, and the ranks with equal
            values.

    Collective:
        All ranks of the group.

    Cost:
        One all_gather of 8 bytes per parameter, about 12 us per parameter, and a pass over this
        rank's parameters at about 1 GB/s (SHA-1).

    Example:
        ```python
        from dure.debug import check_replicas

        model = torch.nn.Linear(4, 2)
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
        check_replicas(model, step=0)
        ```
    """
    pg = resolve(group, "check_replicas")
    named = [*model.named_parameters(), *model.named_buffers()]
    if not named:
        return
    hashes = _gathered([_hash_of(tensor) for _, tensor in named], pg).view(pg.size(), -1)
    for number, (name, tensor) in enumerate(named):
        for ranks in _replicas(tensor, pg):
            values = {rank: int(hashes[pg.group_rank(rank), number]) for rank in ranks}
            if len(set(values.values())) > 1:
                fix = "Check how its gradient is reduced, how it was loaded, and the random seeds."
                where = {"group": pg.group_name, "rank": pg.rank(), "world_size": pg.size()}
                raise _differ(name, step, values, op="check_replicas", fix=fix, **where)


def check_batch(batch: object, mesh: DeviceMesh, *, step: int | None = None) -> None:
    """Raise if ranks that must have the same batch have different ones.

    These are the ranks with the same coordinates on the data axes of the mesh, such as those of a
    tensor or pipeline group; all ranks if the mesh has no data axis. `DistributedSampler` lists the
    names of data axes.

    Args:
        batch: Nested lists, tuples and dicts of plain tensors and values that can be pickled.
        mesh: The mesh of all axes, or of those to compare.
        step: Number of the step, for the error message.

    Raises:
        ReplicasDiffer: On all compared ranks. Has the name of the first entry that differs or that
            some ranks do not have, and the ranks with equal values.

    Collective:
        All ranks of the mesh.

    Cost:
        One all_gather of 8 bytes per compared axis, and a pass over the batch.

    Example:
        ```python
        from dure.debug import check_batch

        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        check_batch({"tokens": torch.arange(8)}, mesh, step=0)
        ```
    """
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names or ()
    if coordinate is None:
        return
    data = {axis for axis, name in enumerate(names) if name in DATA_AXES}
    groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim)) if axis not in data]
    leaves, structure = pytree.tree_flatten_with_path(batch)
    mine = {pytree.keystr(path): _hash_of(leaf) for path, leaf in leaves}
    hashes = torch.tensor([_hash_of((str(structure), mine))], device="cpu")
    for group in groups:
        hashes = _gathered(hashes.tolist(), group)
    if len(hashes.unique()) == 1:
        return
    batches: list[Any] = [mine]
    for group in groups:
        every: list[Any] = [None] * group.size()
        all_gather_object(every, batches, group)
        batches = [one for part in every for one in part]
    compared = tuple(at if axis in data else slice(None) for axis, at in enumerate(coordinate))
    ranks = mesh.mesh[compared].flatten().tolist()
    for name in dict.fromkeys(name for one in batches for name in one):
        values = {rank: one.get(name) for rank, one in zip(ranks, batches, strict=True)}
        if len(set(values.values())) > 1:
            break
    else:  # the same entries in another order or in other containers
        name, values = "", dict(zip(ranks, hashes.tolist(), strict=True))
    fix = "Give DistributedSampler mesh=, and the same seed and data on these ranks."
    raise _differ(f"batch{name}", step, values, op="check_batch", fix=fix, rank=mesh.get_rank())


def _gathered(mine: list[int], group: ProcessGroup) -> torch.Tensor:
    """Return the numbers of all ranks, int64 [ranks * numbers]."""
    numbers = torch.tensor(mine, dtype=torch.int64, device=group.message_device)
    everyone = numbers.new_empty(group.size() * len(mine))
    group.all_gather_single(everyone, numbers)
    return everyone.cpu()


def _hash_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        part = value.part if isinstance(value, DTensor) else value.detach()
        head = f"{value.dtype} {list(value.shape)}".encode()
        data = part.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    else:
        head, data = b"", pickle.dumps(value)
    digest = hashlib.sha1(head, usedforsecurity=False)
    digest.update(data)  # pyright: ignore[reportArgumentType]
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def _replicas(tensor: torch.Tensor, group: ProcessGroup) -> Iterator[list[int]]:
    """Yield sets of global ranks that must have the same values of a tensor."""
    if not isinstance(tensor, DTensor):
        yield list(group.global_ranks)
        return
    mesh: DeviceMesh = tensor.spec.mesh
    same = [axis for axis, p in enumerate(tensor.placements) if p.is_replicate()]
    order = [*(a for a in range(mesh.ndim) if a not in same), *same]
    table = mesh.mesh.permute(order).reshape(-1, _product(mesh, same))
    for row in table.tolist():
        ranks = [rank for rank in row if rank in group.group_rank_of]
        if len(ranks) > 1:
            yield ranks


def _product(mesh: DeviceMesh, axes: list[int]) -> int:
    total = 1
    for axis in axes:
        total *= mesh.shape[axis]
    return total


def _differ(
    name: str, step: int | None, values: Mapping[int, int | None], **fields: object
) -> ReplicasDiffer:
    equal: dict[int | None, list[int]] = {}
    for rank, value in values.items():
        equal.setdefault(value, []).append(rank)
    sets = sorted(equal.values(), key=len, reverse=True)
    when = "" if step is None else f" at step {step}"
    return ReplicasDiffer(
        f"ranks have different values of {name}{when}",
        parameter=name,
        step=step,
        ranks=tuple(map(tuple, sets)),
        seen="equal on " + "; ".join(f"ranks {ranks}" for ranks in sets),
        **fields,
    )
