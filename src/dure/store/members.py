"""The ranks of a job and their processes, as one table that every rank reads at the rendezvous.

A job of thousands of ranks has few hosts per rank, one build, and often equal lists of GPUs. So the
table has each of them once, and per rank little more than two numbers that identify its process.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar, overload

import msgspec

from dure.store.builds import Build
from dure.store.identity import Identity

__all__ = ["MemberTable", "RendezvousMember"]


class RendezvousMember(msgspec.Struct, array_like=True, frozen=True):
    """A rank and the process that is it; every version reads it, so fields are only appended.

    Attributes:
        rank: Its number.
        world_size: How many ranks it believes in.
        process: Its process.
        token: Sets apart the times that one process joins; in a `MemberTable` only rank 0 has one.
        build: Its build of Dure.
        gpus: The GPUs of its host that it may use, by names that differ on the host.
    """

    rank: int
    world_size: int
    process: Identity
    token: str
    build: Build = Build()
    gpus: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.process.pid

    @property
    def host(self) -> str:
        """The host's name."""
        return self.process.host

    @property
    def host_id(self) -> str:
        """Equal for members that can share memory."""
        return self.process.host_id

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """A table as it is sent; the lists have an item per process, `*_of` the number of another."""

    hosts: list[tuple[str, str]]
    pids: list[int]
    starts: list[str]
    host_of: list[int]
    process_of_rank: list[int]
    gpus: list[tuple[str, ...]]
    gpus_of_rank: list[int]
    token: str
    build: Build


_read_columns = msgspec.msgpack.Decoder(_Columns).decode


class MemberTable(Sequence[RendezvousMember]):
    """The members of a job by rank; each is made when it is asked for.

    Args:
        processes: The processes.
        process_of: The number of each rank's process in `processes`.
        gpus: The lists of GPUs that ranks may use.
        gpus_of: The number of each rank's list in `gpus`.
        token: Rank 0's token, which identifies the job.
        build: That of all ranks.

    Threads:
        Nothing is ever changed.
    """

    __slots__ = ("_build", "_gpus", "_gpus_of", "_process_of", "_processes", "_token")

    def __init__(
        self,
        processes: Sequence[Identity],
        process_of: Sequence[int],
        gpus: Sequence[tuple[str, ...]],
        gpus_of: Sequence[int],
        token: str,
        build: Build,
    ) -> None:
        self._processes, self._process_of = processes, process_of
        self._gpus, self._gpus_of = gpus, gpus_of
        self._token, self._build = token, build

    @classmethod
    def of(cls, members: Iterable[RendezvousMember]) -> MemberTable:
        """Make the table of members in the order of their ranks, all of one build."""
        members = list(members)
        processes, process_of = _numbered(member.process for member in members)
        gpus, gpus_of = _numbered(member.gpus for member in members)
        return cls(processes, process_of, gpus, gpus_of, members[0].token, members[0].build)

    @classmethod
    def alone(cls, me: RendezvousMember, world_size: int) -> MemberTable:
        """Make the table of a job whose ranks are all the process of `me`."""
        numbers = [0] * world_size
        return cls([me.process], numbers, [me.gpus], numbers, me.token, me.build)

    def pack(self) -> bytes:
        """Return the table as bytes for `unpack`."""
        hosts, host_of = _numbered((each.host, each.host_id) for each in self._processes)
        columns = _Columns(
            hosts,
            [each.pid for each in self._processes],
            [each.start for each in self._processes],
            host_of,
            list(self._process_of),
            list(self._gpus),
            list(self._gpus_of),
            self._token,
            self._build,
        )
        return zlib.compress(msgspec.msgpack.encode(columns))

    @classmethod
    def unpack(cls, packed: bytes) -> MemberTable:
        """Return the table that was packed."""
        columns = _read_columns(zlib.decompress(packed))
        processes = [
            Identity(pid, start, *columns.hosts[host])
            for pid, start, host in zip(columns.pids, columns.starts, columns.host_of, strict=True)
        ]
        return cls(
            processes,
            columns.process_of_rank,
            columns.gpus,
            columns.gpus_of_rank,
            columns.token,
            columns.build,
        )

    def __len__(self) -> int:
        return len(self._process_of)

    @overload
    def __getitem__(self, index: int) -> RendezvousMember: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RendezvousMember]: ...
    def __getitem__(self, index: int | slice) -> RendezvousMember | Sequence[RendezvousMember]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        return RendezvousMember(
            rank,
            len(self),
            self.process(rank),
            self._token if rank == 0 else "",
            self._build,
            self._gpus[self._gpus_of[rank]],
        )

    def process(self, rank: int) -> Identity:
        """Return a rank's process."""
        return self._processes[self._process_of[rank]]

    def select(self, ranks: Sequence[int]) -> MemberTable:
        """Return the table of some ranks, numbered from 0 in this order."""
        return MemberTable(
            self._processes,
            [self._process_of[rank] for rank in ranks],
            self._gpus,
            [self._gpus_of[rank] for rank in ranks],
            self._token,
            self._build,
        )

    def host_ids(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return for each rank what is equal for ranks that can share memory."""
        of_process = [process.host_id for process in self._processes]
        return tuple([of_process[self._process_of[rank]] for rank in ranks])

    def num_processes(self) -> int:
        """Return how many processes the ranks are."""
        return len(set(self._process_of))

    def num_on_host_of(self, rank: int) -> int:
        """Return how many ranks share the host of `rank`."""
        here = self.process(rank).host_id
        of_process = [process.host_id == here for process in self._processes]
        return sum(n for number, n in Counter(self._process_of).items() if of_process[number])

    def processes_on_host_of(self, rank: int) -> dict[Identity, int]:
        """Return the processes on the host of `rank`, each with the first rank that it is."""
        here, first = self.process(rank).host_id, dict[int, int]()
        for other, number in enumerate(self._process_of):
            first.setdefault(number, other)
        found = {self._processes[number]: other for number, other in first.items()}
        return {process: other for process, other in found.items() if process.host_id == here}


_T = TypeVar("_T", bound=Hashable)


def _numbered(values: Iterable[_T]) -> tuple[list[_T], list[int]]:
    """Return the values that differ, and the number of each one among these."""
    numbers: dict[_T, int] = {}
    number_of = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), number_of
