"""Checks that a program runs while it is looked for what goes wrong.

`check_replicas(model)`, called once a step, finds the first parameter of which ranks that ought to
have the same have not: a gradient that was reduced over too few ranks, a random number drawn from
another seed, a weight that was loaded on one rank only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from dure.comm.group import ProcessGroup
from dure.comm.world import resolve
from dure.errors import ReplicasDiffer
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor

__all__ = ["check_replicas"]


def check_replicas(
    model: torch.nn.Module, *, step: int | None = None, group: ProcessGroup | None = None
) -> None:
    """Raise on all ranks if a parameter differs where it ought to be the same.

    A plain parameter or buffer is the same on all ranks of `group`; a DTensor on the ranks of its
    mesh that stand alike on the axes that shard it.

    Args:
        model: With the same names on all ranks.
        step: Is told in the error.
        group: Who takes part; the world where None.

    Raises:
        ReplicasDiffer: Names the first parameter that differs, and which ranks have which value.

    Collective:
        All ranks of the group.

    Cost:
        One all_gather of 8 bytes a parameter, and one pass over this rank's parameters (1 GB/s).
    """
    pg = resolve(group, "check_replicas")
    named = [*model.named_parameters(), *model.named_buffers()]
    if not named:
        return
    mine = torch.tensor([_hash_of(tensor) for _, tensor in named], dtype=torch.int64)
    everyone = torch.empty(pg.size() * len(named), dtype=torch.int64)
    pg.all_gather_single(everyone, mine)
    hashes = everyone.view(pg.size(), len(named))
    for number, (name, tensor) in enumerate(named):
        for ranks in _replicas(tensor, pg):
            values = {rank: int(hashes[pg.group_rank(rank), number]) for rank in ranks}
            if len(set(values.values())) > 1:
                raise _differ(name, step, values, pg)


def _hash_of(tensor: torch.Tensor) -> int:
    part = tensor.part if isinstance(tensor, DTensor) else tensor.detach()
    data = part.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(data, digest_size=8).digest()  # pyright: ignore[reportArgumentType]
    return int.from_bytes(digest, "little", signed=True)


def _replicas(tensor: torch.Tensor, group: ProcessGroup) -> Iterator[list[int]]:
    """Yield the global ranks that have the same of a tensor."""
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
    name: str, step: int | None, values: dict[int, int], group: ProcessGroup
) -> ReplicasDiffer:
    alike: dict[int, list[int]] = {}
    for rank, value in values.items():
        alike.setdefault(value, []).append(rank)
    sets = sorted(alike.values(), key=len, reverse=True)
    when = "" if step is None else f" at step {step}"
    return ReplicasDiffer(
        f"ranks have different values of {name}{when}",
        parameter=name,
        step=step,
        ranks=tuple(map(tuple, sets)),
        op="check_replicas",
        group=group.group_name,
        rank=group.rank(),
        world_size=group.size(),
        seen="alike are " + "; ".join(f"ranks {ranks}" for ranks in sets),
        fix="See which reduction its gradient had, and what was loaded or drawn on the odd ranks.",
    )
