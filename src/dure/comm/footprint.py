"""What groups hold in this process: memory that their ranks share, and connections.

A group over shared memory has one memory file, with the slots through which its ranks exchange
data. Its length is only an address range: memory is taken page by page, when a slot is first used.
The symmetric heap and the thread that watches peers are one for a process, whatever its groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dure import native
from dure.comm.group import ProcessGroup

__all__ = ["GroupMemory", "Held", "held_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """What one group holds in this process.

    Attributes:
        name: The group's.
        desc: What it is for, such as "mesh_dp".
        ranks: Global ranks.
        backend: Name of its backend.
        reserved_bytes: Length of its slots' address range.
        used_bytes: How much of it this rank has touched.
        connections: How many ranks it is connected with over a network.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    reserved_bytes: int
    used_bytes: int
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What groups hold in this process; prints as a table.

    Attributes:
        groups: Each group by itself.
        heap_bytes: Of the symmetric heap that all groups share: in tensors.
        heap_kept_bytes: Freed, and kept for new tensors.
    """

    groups: tuple[GroupMemory, ...]
    heap_bytes: int
    heap_kept_bytes: int

    def __str__(self) -> str:
        lines = [f"{'group':<12} {'for':<12} {'backend':<8} {'slots KiB':>10} {'used':>8} "
                 f"{'connections':>11}  ranks"]  # fmt: skip
        lines += [
            f"{g.name:<12} {g.desc:<12} {g.backend:<8} {g.reserved_bytes >> 10:>10,} "
            f"{g.used_bytes >> 10:>8,} {g.connections:>11}  {', '.join(map(str, g.ranks))}"
            for g in self.groups
        ]
        heap = f"{self.heap_bytes >> 10:,} KiB in tensors, {self.heap_kept_bytes >> 10:,} KiB kept"
        return "\n".join([*lines, f"symmetric heap of all groups: {heap}"])


def held_by(groups: Iterable[ProcessGroup]) -> Held:
    """Return what groups hold in this process.

    Cost:
        Some milliseconds: the kernel counts the pages of every mapping of the process.
    """
    touched = _touched()
    found: list[GroupMemory] = []
    for group in groups:
        held = group.footprints
        found.append(
            GroupMemory(
                name=group.group_name,
                desc=group.desc,
                ranks=group.global_ranks,
                backend=group.backend_name,
                reserved_bytes=sum(one.nbytes for one in held),
                used_bytes=sum(touched[one.inode] for one in held),
                connections=sum(one.connections for one in held),
            )
        )
    used, kept, _ = native.heap_usage() if native.available()[0] else (0, 0, 0)
    return Held(groups=tuple(found), heap_bytes=used, heap_kept_bytes=kept)


def _touched() -> Counter[int]:
    """Return how many bytes of each shared file, by inode, this process has in memory."""
    found: Counter[int] = Counter()
    maps = Path("/proc/self/smaps")
    inode = 0
    for line in maps.read_text().splitlines() if maps.exists() else ():
        words = line.split()
        if not words[0].endswith(":"):
            inode = int(words[4]) if "memfd:" in line else 0
        elif words[0] == "Rss:" and inode:
            found[inode] += int(words[1]) << 10
    return found
