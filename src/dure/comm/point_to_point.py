"""Messages between two ranks: send, recv, isend, irecv, and batches of them.

Messages of one pair of ranks with one tag arrive in the order they were sent; messages with
different tags may be received in any order. They are independent of the group's collectives, and
have the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dure.comm.capture import out_of_graphs
from dure.comm.group import ProcessGroup, started
from dure.comm.overlap import check_apart
from dure.comm.work import Work
from dure.comm.world import resolve
from dure.errors import UsageError


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor` to `dst`; return when it may be changed again.

    Args:
        tensor: The tensor to send, of any shape.
        dst: Global rank of the receiver.
        group: The group of both ranks; the default group if None.
        tag: A number >= 0, which the receive must have too.
        group_dst: The same as a rank of the group, in place of `dst`.

    Raises:
        UsageError: `dst` is this rank, or not in the group.
        PeerLost: The receiver died.
        CommTimeout: The message is large and was not received in time.

    Cost:
        1 step; S bytes.

    Example:
        ```python
        if dist.get_rank() == 0:
            dist.send(torch.arange(3.0), dst=1)
        else:
            received = torch.empty(3)
            assert dist.recv(received, src=0) == 0
            assert received.tolist() == [0.0, 1.0, 2.0]
        ```
    """
    pg = resolve(group, "send")
    # `peer` without its call, which would be a tenth of a small message's time.
    to = pg.group_rank_of.get(dst) if group_dst is None and type(dst) is int else None
    pg.send(tensor, pg.peer(dst, group_dst, "send", "dst") if to is None else to, tag)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start to send `tensor`, which must not be changed until the returned `Work` has ended.

    Args:
        tensor: The tensor to send, of any shape.
        dst: Global rank of the receiver.
        group: The group of both ranks; the default group if None.
        tag: A number >= 0, which the receive must have too.
        group_dst: The same as a rank of the group, in place of `dst`.

    Returns:
        The work, which raises the errors of `send`.

    Example:
        ```python
        peer = 1 - dist.get_rank()  # on 2 ranks
        received = torch.empty(1)
        works = [dist.isend(torch.tensor([float(peer)]), peer), dist.irecv(received, peer)]
        for work in works:
            work.wait()
        assert received.item() == dist.get_rank()
        ```
    """
    pg = resolve(group, "isend")
    return started(pg.send(tensor, pg.peer(dst, group_dst, "isend", "dst"), tag, async_op=True))


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into `tensor`; return the sender's global rank.

    Args:
        tensor: The tensor to receive into, of the number of elements and dtype that are sent.
        src: Global rank of the sender; any rank if None.
        group: The group of both ranks; the default group if None.
        tag: The number that the send has.
        group_src: The same as a rank of the group, in place of `src`.

    Returns:
        The sender's global rank.

    Raises:
        Desync: The message has another length or dtype (over mpi: length). It is kept for a receive
            that fits. gloo and nccl do not compare.
        PeerLost: The sender died.
        CommTimeout: No message arrived in time.

    Cost:
        As `send`.

    Example:
        ```python
        x = torch.zeros(3)
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), dst=1)
        else:
            assert dist.recv(x) == 0  # from any rank
            assert x.tolist() == [1.0, 1.0, 1.0]
        ```
    """
    pg = resolve(group, "recv")
    source = pg.group_rank_of.get(src) if group_src is None and type(src) is int else None
    if source is None:
        source = pg.source(src, group_src, "recv")
    return pg.global_ranks[pg.recv(tensor, source, tag, True)]


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start to receive into `tensor`, which must not be used until the returned `Work` has ended.

    Args:
        tensor: The tensor to receive into, of the number of elements and dtype that are sent.
        src: Global rank of the sender; any rank if None.
        group: The group of both ranks; the default group if None.
        tag: The number that the send has.
        group_src: The same as a rank of the group, in place of `src`.

    Returns:
        The work, which raises the errors of `recv`; its `source_rank()` is the sender.

    Example:
        ```python
        x, peer = torch.zeros(3), 1 - dist.get_rank()
        arriving = dist.irecv(x, src=peer)
        dist.send(torch.full((3,), float(peer)), dst=peer)
        arriving.wait()
        assert x.tolist() == [float(dist.get_rank())] * 3
        ```
    """
    pg = resolve(group, "irecv")
    return pg.irecv(tensor, pg.source(src, group_src, "irecv"), tag, True)


out_of_graphs(send, recv, isend, irecv)


class P2POp:
    """One message of a batch.

    Args:
        op: `dure.isend` or `dure.irecv`.
        tensor: The tensor to send, or to receive into.
        peer: Global rank of the other rank.
        group: The group of both ranks; the default group if None.
        tag: A number >= 0, the same for the send and the receive.
        group_peer: The same as a rank of the group, in place of `peer`.

    Example:
        ```python
        peer = 1 - dist.get_rank()
        mine, theirs = torch.tensor([float(dist.get_rank())]), torch.zeros(1)
        sends = dist.P2POp(dist.isend, mine, peer)
        receives = dist.P2POp(dist.irecv, theirs, peer)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        assert theirs.item() == peer
        ```
    """

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise UsageError("P2POp takes dure.isend or dure.irecv", op="P2POp", seen=f"got {op!r}")
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        pg = resolve(group, "P2POp")
        self.group_peer = pg.peer(peer, group_peer, "P2POp", "peer")
        self.peer = pg.global_ranks[self.group_peer]

    def __repr__(self) -> str:
        shape = tuple(self.tensor.shape)
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag}, shape={shape})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start several sends and receives; none of them waits for another.

    Args:
        p2p_op_list: The messages, all of one group.

    Returns:
        One `Work` for each, in the same order.

    Raises:
        UsageError: The list is empty, has other objects, or messages of two groups.
        ShapeError: A tensor to receive into overlaps another one of the list.

    Example:
        ```python
        peer, received = 1 - dist.get_rank(), torch.empty(2)  # on 2 ranks
        send = dist.P2POp(dist.isend, torch.full((2,), float(peer)), peer)
        receive = dist.P2POp(dist.irecv, received, peer)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        assert received.tolist() == [dist.get_rank()] * 2
        ```
    """
    if not p2p_op_list or not all(isinstance(p, P2POp) for p in p2p_op_list):
        raise UsageError(
            "expected a list of P2POp, and at least one",
            op="batch_isend_irecv",
            seen=f"got {p2p_op_list!r}",
        )
    groups = {id(resolve(p.group, "batch_isend_irecv")) for p in p2p_op_list}
    if len(groups) != 1:
        raise UsageError(
            "all messages of a batch must belong to one group",
            op="batch_isend_irecv",
            seen=f"{len(groups)} groups",
        )
    receives = [p.tensor for p in p2p_op_list if p.op is irecv]
    sends = [p.tensor for p in p2p_op_list if p.op is isend]
    check_apart(receives, sends, "batch_isend_irecv")
    with resolve(p2p_op_list[0].group, "batch_isend_irecv").together([*receives, *sends]):
        return [
            isend(p.tensor, group=p.group, tag=p.tag, group_dst=p.group_peer)
            if p.op is isend
            else irecv(p.tensor, group=p.group, tag=p.tag, group_src=p.group_peer)
            for p in p2p_op_list
        ]
