"""Collectives of picklable Python objects.

An object is sent as the bytes of its pickle in an uint8 tensor, after a message with its length.
Unpickling can run any code: all ranks of a job share one key, and trust each other.

Cost:
    One small collective for the lengths and one for the bytes; use tensors in inner loops.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from dure.comm.group import ProcessGroup
from dure.comm.world import resolve
from dure.errors import ShapeError, UsageError

Device = torch.device | str


def _pack(obj: object, device: Device) -> torch.Tensor:
    return _pack_all([obj], device)[1]


def _unpack(data: torch.Tensor, place: Any = None) -> Any:
    """Return the object; if nothing was sent (the backend `fake`), the one in its place."""
    return pickle.loads(data.cpu().numpy().data) if data.numel() else place


def _unpack_all(data: torch.Tensor, lengths: list[int], places: list[Any]) -> None:
    """Replace the objects in `places` by those sent."""
    places[:] = [_unpack(p, old) for p, old in zip(data.split(lengths), places, strict=True)]


def _pack_all(objects: Sequence[object], device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of the pickles, and their bytes in one tensor.

    On the CPU the tensor shares the memory of the pickles.
    """
    file, ends = io.BytesIO(), [0]
    for obj in objects:
        pickle.dump(obj, file)
        ends.append(file.getbuffer().nbytes)
    data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8) if ends[-1] else _empty(0, device)
    return torch.tensor(ends, device=device).diff(), data.to(device)


def _empty(count: int, device: Device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _group(
    group: ProcessGroup | None, op: str, device: Device | None = None
) -> tuple[ProcessGroup, Device]:
    """Return the group, and the device of messages: the CPU if the group takes CPU tensors."""
    pg = resolve(group, op)
    pg.refuse_coalescing(
        op,
        "objects cannot be sent within a coalescing manager",
        "their lengths must be known before their bytes are sent",
    )
    if device is None:
        device = pg.message_device
    return pg, device


def _need_places(places: Sequence[Any] | None, pg: ProcessGroup, op: str, what: str) -> None:
    """Raise unless there is one place for each rank."""
    if places is None or len(places) != pg.size():
        raise ShapeError(what, op=op, seen=f"{places!r} for {pg.size()} ranks")


def _slots(pg: ProcessGroup, data: torch.Tensor) -> list[torch.Tensor]:
    """Return memory for the `data` of each rank, after an exchange of lengths."""
    sizes = torch.empty(pg.size(), dtype=torch.int64, device=data.device)
    pg.all_gather_single(sizes, torch.tensor([data.numel()], device=data.device))
    return [_empty(k, data.device) for k in sizes.tolist()]


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Fill `object_list` with the `obj` of all ranks, in the order of ranks.

    Args:
        object_list: A list of n elements, which are replaced.
        obj: This rank's object; it must be picklable.
        group: The ranks that take part; the default group if None.

    Raises:
        ShapeError: `object_list` does not have n elements.
        CommError: The operation failed.

    Collective:
        All ranks of the group call.

    Example:
        ```python
        objects = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        assert objects == [{"rank": 0}, {"rank": 1}]  # on 2 ranks
        ```
    """
    op = "all_gather_object"
    pg, where = _group(group, op)
    if len(object_list) != pg.size():
        raise ShapeError(
            "object_list has the wrong length",
            op=op,
            seen=f"{len(object_list)} places for {pg.size()} ranks",
        )
    data = _pack(obj, where)
    slots = _slots(pg, data)
    pg.all_gather(slots, data)
    object_list[:] = [_unpack(slot) for slot in slots]


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
        object_gather_list: On `dst` a list of n elements, which are replaced; else None.
        dst: Global rank of the rank that receives; the group's first if None.
        group: The ranks that take part; the default group if None.
        group_dst: The same as a rank of the group, in place of `dst`.

    Raises:
        ShapeError: `object_gather_list` does not have n elements on `dst`.
        CommError: The operation failed.

    Collective:
        All ranks of the group call.

    Example:
        ```python
        objects = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(str(dist.get_rank()), objects, dst=0)
        assert objects in (["0", "1"], None)  # on 2 ranks
        ```
    """
    op = "gather_object"
    pg, where = _group(group, op)
    root = pg.root(dst, group_dst, op, "dst")
    places = object_gather_list if pg.rank() == root else None
    if pg.rank() == root:
        what = "object_gather_list must have one place for each rank on the root"
        _need_places(places, pg, op, what)
    data = _pack(obj, where)
    if places is None:
        pg.gather(torch.tensor([data.numel()], device=where), None, root)
        pg.gather(data, None, root)
        return
    sizes = [torch.zeros(1, dtype=torch.int64, device=where) for _ in places]
    pg.gather(torch.tensor([data.numel()], device=where), sizes, root)
    slots = [_empty(int(size), where) for size in sizes]
    pg.gather(data, slots, root)
    places[:] = [_unpack(slot) for slot in slots]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects in `object_list` by those of `src`.

    Args:
        object_list: A list of the same length on all ranks.
        src: Global rank of the rank that sends; the group's first if None.
        group: The ranks that take part; the default group if None.
        device: Device of the messages; chosen by the backend if None.
        group_src: The same as a rank of the group, in place of `src`.

    Raises:
        CommError: The operation failed.

    Collective:
        All ranks of the group call.

    Example:
        ```python
        settings = [{"lr": 0.1} if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(settings, src=0)
        assert settings == [{"lr": 0.1}]
        ```
    """
    op = "broadcast_object_list"
    pg, where = _group(group, op, device)
    root = pg.root(src, group_src, op, "src")
    if pg.rank() == root:
        sizes, data = _pack_all(object_list, where)
        pg.broadcast(sizes, root)
        pg.broadcast(data, root)
        return
    sizes = torch.zeros(len(object_list), dtype=torch.int64, device=where)
    pg.broadcast(sizes, root)
    lengths: list[int] = sizes.tolist()
    data = _empty(sum(lengths), where)
    pg.broadcast(data, root)
    _unpack_all(data, lengths, object_list)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Put the i-th object of `src` into `scatter_object_output_list[0]` of rank i.

    Args:
        scatter_object_output_list: A list of at least one element; the first is replaced.
        scatter_object_input_list: On `src` n objects; ignored on other ranks.
        src: Global rank of the rank that sends; the group's first if None.
        group: The ranks that take part; the default group if None.
        group_src: The same as a rank of the group, in place of `src`.

    Raises:
        UsageError: `scatter_object_output_list` is empty.
        ShapeError: `scatter_object_input_list` does not have n objects on `src`.
        CommError: The operation failed.

    Collective:
        All ranks of the group call.

    Example:
        ```python
        mine = [None]
        dist.scatter_object_list(mine, ["a", "b"] if dist.get_rank() == 0 else None, src=0)
        assert mine == ["ab"[dist.get_rank()]]  # on 2 ranks
        ```
    """
    op = "scatter_object_list"
    pg, where = _group(group, op)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "Expected argument scatter_object_output_list to be a list of size at least 1.",
            op=op,
            seen=f"got {scatter_object_output_list!r}",
        )
    root = pg.root(src, group_src, op, "src")
    packed = sizes = None
    if pg.rank() == root:
        what = "scatter_object_input_list must have one object for each rank"
        _need_places(scatter_object_input_list, pg, op, what)
        packed = [_pack(o, where) for o in scatter_object_input_list or ()]
        sizes = [torch.tensor([p.numel()], device=where) for p in packed]
    size = torch.zeros(1, dtype=torch.int64, device=where)
    pg.scatter(size, sizes, root)
    data = _empty(int(size.item()), where)
    pg.scatter(data, packed, root)
    scatter_object_output_list[0] = _unpack(data, scatter_object_output_list[0])


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects of `object_list` to `dst`, whose list has the same length.

    Args:
        object_list: The objects to send; they must be picklable.
        dst: Global rank of the receiver.
        group: The group of both ranks; the default group if None.
        device: Device of the messages; chosen by the backend if None.
        group_dst: The same as a rank of the group, in place of `dst`.
        use_batch: Ignored.

    Raises:
        CommError: The operation failed.

    Example:
        ```python
        if dist.get_rank() == 0:
            dist.send_object_list([{"lr": 0.1}, "done"], dst=1)
        elif dist.get_rank() == 1:
            received = [None, None]                          # as many as are sent
            assert dist.recv_object_list(received, src=0) == 0
            assert received == [{"lr": 0.1}, "done"]
        ```
    """
    op = "send_object_list"
    pg, where = _group(group, op, device)
    peer = pg.peer(dst, group_dst, op, "dst")
    sizes, data = _pack_all(object_list, where)
    pg.send(sizes, peer)
    pg.send(data, peer)


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
        object_list: A list of as many elements as are sent, which are replaced.
        src: Global rank of the sender; any rank if None.
        group: The group of both ranks; the default group if None.
        device: Device of the messages; chosen by the backend if None.
        group_src: The same as a rank of the group, in place of `src`.
        use_batch: Ignored.

    Raises:
        CommError: The operation failed.

    Example:
        ```python
        found = [None]
        if dist.get_rank() == 0:
            dist.send_object_list([{"step": 3}], dst=1)
        else:
            assert dist.recv_object_list(found, src=0) == 0 and found == [{"step": 3}]
        ```
    """
    op = "recv_object_list"
    pg, where = _group(group, op, device)
    peer = pg.source(src, group_src, op)
    sizes = torch.zeros(len(object_list), dtype=torch.int64, device=where)
    sender = pg.recv(sizes, peer)
    lengths: list[int] = sizes.tolist()
    data = _empty(sum(lengths), where)
    pg.recv(data, sender)
    _unpack_all(data, lengths, object_list)
    return pg.global_ranks[sender]
