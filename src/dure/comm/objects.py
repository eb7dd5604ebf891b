"""Collectives of picklable Python objects.

An object travels as the bytes of its pickle in an uint8 tensor, behind a message with its length.
Unpickling runs code of the sender's choice: all ranks of a job share one key, and trust each other.

Cost: one small collective for the lengths and one for the bytes; use tensors in inner loops.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.world import resolve
from dure.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def _pack(obj: object, device: torch.device | str | None = None) -> torch.Tensor:
    data = bytearray(pickle.dumps(obj))
    return torch.frombuffer(data, dtype=torch.uint8).to(device or "cpu")


def _joined(packed: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *packed])


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


def _group(group: ProcessGroup | None, op: str) -> ProcessGroup:
    """Return the group that is meant; refuse one whose operations are being coalesced."""
    pg = resolve(group, op)
    if pg.coalesced is not None:
        raise UsageError(
            "objects cannot be sent within a coalescing manager",
            op=op,
            group=pg.group_name,
            seen="their lengths must be known before their bytes are sent",
            fix="Call it before or after the manager's block.",
        )
    return pg


def _device(pg: ProcessGroup, device: torch.device | str | None = None) -> torch.device | str:
    """Where messages live: on the CPU if the group reaches it, else on its accelerator."""
    if device is not None:
        return device
    types = pg.device_types
    return "cpu" if "cpu" in types else next(iter(types))


def _gather_sizes(pg: ProcessGroup, data: torch.Tensor) -> list[int]:
    sizes = torch.empty(pg.size(), dtype=torch.int64, device=data.device)
    pg.all_gather_single(sizes, torch.tensor([data.numel()], device=data.device))
    return sizes.tolist()


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Fill `object_list` with the `obj` of all ranks, in the order of ranks.

    Args:
        object_list: n places; what is in them is replaced.
        obj: This rank's object; it must be picklable.
        group: The ranks that take part.

    Raises:
        ShapeError: `object_list` does not have n places.
    """
    pg = _group(group, "all_gather_object")
    if len(object_list) != pg.size():
        raise ShapeError(
            "object_list has the wrong length",
            op="all_gather_object",
            seen=f"{len(object_list)} places for {pg.size()} ranks",
        )
    data = _pack(obj, _device(pg))
    parts = [torch.empty(k, dtype=torch.uint8, device=data.device) for k in _gather_sizes(pg, data)]
    pg.all_gather(parts, data)
    object_list[:] = [_unpack(p) for p in parts]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Fill `object_gather_list` on `dst` with the `obj` of all ranks.

    Args:
        obj: This rank's object; it must be picklable.
        object_gather_list: On `dst`: n places. Elsewhere None.
        dst: Global rank of the root; the group's first rank by default.
        group: The ranks that take part.
        group_dst: The root as a rank of the group, in place of `dst`.
    """
    op = "gather_object"
    pg = _group(group, op)
    root = 0 if dst is None and group_dst is None else pg.peer(dst, group_dst, op, "dst")
    at_root = pg.rank() == root
    if at_root and (object_gather_list is None or len(object_gather_list) != pg.size()):
        raise ShapeError(
            "object_gather_list must have one place for each rank on the root",
            op=op,
            seen=f"{object_gather_list!r} for {pg.size()} ranks",
        )
    data = _pack(obj, _device(pg))
    sizes = _gather_sizes(pg, data)
    parts = None
    if at_root:
        parts = [torch.empty(k, dtype=torch.uint8, device=data.device) for k in sizes]
    pg.gather(data, parts, root)
    if parts is not None and object_gather_list is not None:
        object_gather_list[:] = [_unpack(p) for p in parts]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects in `object_list` by those of `src`.

    Args:
        object_list: The same length on all ranks.
        src: Global rank of the root; the group's first rank by default.
        group: The ranks that take part.
        device: Where the messages live; chosen by the backend where None.
        group_src: The root as a rank of the group, in place of `src`.
    """
    op = "broadcast_object_list"
    pg = _group(group, op)
    root = 0 if src is None and group_src is None else pg.peer(src, group_src, op, "src")
    where = _device(pg, device)
    packed: list[torch.Tensor] = []
    sizes = torch.zeros(len(object_list), dtype=torch.int64, device=where)
    if pg.rank() == root:
        packed = [_pack(o, where) for o in object_list]
        sizes = torch.tensor([p.numel() for p in packed], dtype=torch.int64, device=where)
    pg.broadcast(sizes, root)
    lengths: list[int] = sizes.tolist()
    if pg.rank() == root:
        data = _joined(packed, where)
    else:
        data = torch.empty(sum(lengths), dtype=torch.uint8, device=where)
    pg.broadcast(data, root)
    if pg.rank() != root:
        object_list[:] = [_unpack(p) for p in data.split(lengths)]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Put the i-th object of `src` into `scatter_object_output_list[0]` of rank i.

    Args:
        scatter_object_output_list: At least one place.
        scatter_object_input_list: On `src`: n objects. Elsewhere ignored.
        src: Global rank of the root; the group's first rank by default.
        group: The ranks that take part.
        group_src: The root as a rank of the group, in place of `src`.
    """
    op = "scatter_object_list"
    pg = _group(group, op)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "Expected argument scatter_object_output_list to be a list of size at least 1.",
            op=op,
            seen=f"got {scatter_object_output_list!r}",
        )
    root = 0 if src is None and group_src is None else pg.peer(src, group_src, op, "src")
    where = _device(pg)
    packed: list[torch.Tensor] | None = None
    sizes: list[torch.Tensor] | None = None
    if pg.rank() == root:
        objects = scatter_object_input_list
        if objects is None or len(objects) != pg.size():
            raise ShapeError(
                "scatter_object_input_list must have one object for each rank",
                op=op,
                seen=f"{objects!r} for {pg.size()} ranks",
            )
        packed = [_pack(o, where) for o in objects]
        sizes = [torch.tensor([p.numel()], device=where) for p in packed]
    size = torch.empty(1, dtype=torch.int64, device=where)
    pg.scatter(size, sizes, root)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=where)
    pg.scatter(data, packed, root)
    scatter_object_output_list[0] = _unpack(data)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects of `object_list` to `dst`.

    Args:
        object_list: What to send; the receiver's list has the same length.
        dst: Global rank of the receiver.
        group: The group whose order of messages holds.
        device: Where the messages live; chosen by the backend where None.
        group_dst: The receiver as a rank of the group, in place of `dst`.
        use_batch: Accepted for torch's sake.
    """
    pg = _group(group, "send_object_list")
    peer = pg.peer(dst, group_dst, "send_object_list", "dst")
    where = _device(pg, device)
    packed = [_pack(o, where) for o in object_list]
    pg.send(torch.tensor([p.numel() for p in packed], dtype=torch.int64, device=where), peer)
    pg.send(_joined(packed, where), peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Replace the objects of `object_list` by those received; return the sender's global rank.

    Args:
        object_list: As many places as objects were sent.
        src: Global rank of the sender; None for anyone.
        group: The group whose order of messages holds.
        device: Where the messages live; chosen by the backend where None.
        group_src: The sender as a rank of the group, in place of `src`.
        use_batch: Accepted for torch's sake.
    """
    pg = _group(group, "recv_object_list")
    anyone = src is None and group_src is None
    peer = None if anyone else pg.peer(src, group_src, "recv_object_list", "src")
    where = _device(pg, device)
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=where)
    sender = pg.recv(sizes, peer)
    lengths: list[int] = sizes.tolist()
    data = torch.empty(sum(lengths), dtype=torch.uint8, device=where)
    pg.recv(data, sender)
    object_list[:] = [_unpack(p) for p in data.split(lengths)]
    return pg.global_ranks[sender]
