"""Signals between the ranks of a host: words in shared memory, and functions that wait for them.

`SymmetricMemory` (symmetric_memory.py) has them in memory of each rank, whose addresses the ranks
exchange. `signals_in` makes more of them, for the same ranks, in memory that all of them share
(`host_shared_empty`): so no exchange is needed, and the memory is freed when the last rank drops
it. A rank may drop it while others still signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.memory import change_word
from dure.errors import CommTimeout, PeerLost, UsageError
from dure.native import HeapMemory, Process

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Signals", "bytes_of_signals", "signals_in"]

_FREE, _SET = 0, 1
_OK, _LATE, _DEAD = 0, 1, 2
_SHARED_CHANNELS = 2
_SHARED_PAD_BYTES = 2 * _SHARED_CHANNELS * 4  # per rank and peer: signals, and barriers


def bytes_of_signals(world_size: int) -> int:
    """Return the memory that `signals_in` needs."""
    return _SHARED_PAD_BYTES * world_size**2


def signals_in(memory: torch.Tensor, like: Signals) -> Signals:
    """Return signals for the ranks of other signals, in memory that the ranks share.

    Args:
        memory: Zeros of `host_shared_empty`, at least `bytes_of_signals`. The caller keeps it as
            long as the signals.
        like: Other signals of the ranks.
    """
    ranks = range(like.world_size)
    peers: Sequence[Process] = like._peers  # pyright: ignore[reportPrivateUsage]
    group = like._group  # pyright: ignore[reportPrivateUsage]
    owner, size = peers[0], _SHARED_PAD_BYTES * like.world_size
    heap_begin = torch.frombuffer(owner.memory(0, 1), dtype=torch.uint8).data_ptr()
    begin = memory.data_ptr() - heap_begin
    pads = [owner.memory(begin + rank * size, size) for rank in ranks]
    return Signals(group, peers, pads, _SHARED_CHANNELS)


class Signals:
    """Signals between the ranks of a group, and barriers made of them.

    A *signal* is a word for each pair of ranks and channel, in memory of the rank that waits for
    it. It is either set or not: `put_signal` waits until the last one was taken.

    Threads:
        One at a time for each pair of ranks and channel.

    Attributes:
        rank: This rank in the group.
        world_size: Ranks of the group.
    """

    def __init__(
        self,
        group: ProcessGroup,
        peers: Sequence[Process],
        pads: Sequence[HeapMemory],
        channels: int,
    ) -> None:
        self._group, self.rank, self.world_size = group, group.rank(), group.size()
        self._peers, self._pads, self._channels = peers, pads, channels

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Set the signal for which `dst_rank` waits; it then sees all earlier writes.

        Args:
            dst_rank: The rank to signal.
            channel: Which of the independent signals; `SymmetricMemory` has 16.
            timeout_ms: How long to wait until the last one was taken; 0: the group's timeout.

        Raises:
            CommTimeout: It was not taken in time.
            PeerLost: `dst_rank` has died.
        """
        word = self._word(channel, self.rank, dst_rank)
        self._change("put_signal", dst_rank, dst_rank, word, (_FREE, _SET), timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for the signal of `src_rank`, and take it.

        Raises:
            CommTimeout: It was not set in time.
            PeerLost: `src_rank` has died.
        """
        word = self._word(channel, src_rank, self.rank)
        self._change("wait_signal", self.rank, src_rank, word, (_SET, _FREE), timeout_ms)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return when all ranks have called with this channel.

        Independent of the group's `barrier`, and of signals.

        Cost:
            n-1 words written, n-1 waited for.

        Raises:
            CommTimeout: Not all called in time.
            PeerLost: A rank has died.
        """
        half = self._channels * self.world_size
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            word = half + self._word(channel, self.rank, peer)
            self._change("barrier", peer, peer, word, (_FREE, _SET), timeout_ms)
        for step in range(1, self.world_size):
            peer = (self.rank - step) % self.world_size
            word = half + self._word(channel, peer, self.rank)
            self._change("barrier", self.rank, peer, word, (_SET, _FREE), timeout_ms)

    def _rank_of(self, rank: int) -> int:
        if rank not in range(self.world_size):
            raise UsageError(
                f"{rank!r} is not a rank of the group",
                group=self._group.group_name,
                seen=f"its ranks are 0 to {self.world_size - 1}",
            )
        return rank

    def _word(self, channel: int, source: int, to: int) -> int:
        self._rank_of(to)
        if channel not in range(self._channels):
            raise UsageError(
                f"channel {channel!r} is none of 0 to {self._channels - 1}",
                group=self._group.group_name,
            )
        return channel * self.world_size + self._rank_of(source)

    def _change(
        self, op: str, holder: int, peer: int, word: int, step: tuple[int, int], timeout_ms: int
    ) -> None:
        """Wait until a word of `holder` is ``step[0]``, and make it ``step[1]``."""
        timeout_s = timeout_ms / 1000 or self._group.timeout.total_seconds()
        process = self._peers[peer]
        ended = change_word(self._pads[holder], word, *step, process, timeout_s)
        if ended == _DEAD:
            raise self._lost(peer, process.pid, process.fate())
        if ended == _LATE:
            raise CommTimeout(
                f"rank {peer} did not answer",
                missing=(peer,),
                op=op,
                group=self._group.group_name,
                rank=self.rank,
                world_size=self.world_size,
                peer=peer,
                elapsed_s=timeout_s,
            )

    def _lost(self, rank: int, pid: int, fate: str) -> PeerLost:
        return PeerLost(
            f"the process of rank {rank} ended",
            pid=pid,
            exit=fate or None,
            op="rendezvous",
            group=self._group.group_name,
            rank=self.rank,
            world_size=self.world_size,
            peer=rank,
            seen=", ".join([f"pid {pid}", *([fate] if fate else [])]),
        )
