"""The table of the ranks and their processes."""

from __future__ import annotations

import uuid

from dure.store.builds import own_build
from dure.store.identity import Identity
from dure.store.members import MemberTable, RendezvousMember

RANKS, PER_HOST = 256, 8


def members(num: int) -> list[RendezvousMember]:
    """Return ranks on hosts of eight, as they are in a job."""
    made: list[RendezvousMember] = []
    for rank in range(num):
        if rank % PER_HOST == 0:
            host, host_id = f"node-{rank // PER_HOST:04}", f"{uuid.uuid4()} pid:[4026531836] 1000"
        process = Identity(41_000 + 37 * rank, str(8_000_000 + 11 * rank), host, host_id)
        gpus = tuple(map(str, range(8)))
        token = "first" if rank == 0 else ""
        made.append(RendezvousMember(rank, num, process, token, own_build(), gpus))
    return made


def test_a_table_is_the_members_that_it_was_made_of() -> None:
    made = members(24)
    table = MemberTable.unpack(MemberTable.of(made).pack())
    assert list(table) == made
    assert table[-1] == made[23]
    assert table[2:4] == made[2:4]
    assert table.host_ids((0, 23)) == (made[0].host_id, made[23].host_id)
    assert (table.num_processes(), table.num_on_host_of(9)) == (24, 8)
    assert table.processes_on_host_of(9) == {made[r].process: r for r in range(8, 16)}


def test_a_part_of_a_table_has_its_own_numbers() -> None:
    made = members(24)
    part = MemberTable.of(made).select((20, 3))
    assert [(m.rank, m.world_size, m.pid) for m in part] == [
        (0, 2, made[20].pid),
        (1, 2, made[3].pid),
    ]
    assert part.num_processes() == 2
    assert part.num_on_host_of(0) == 1


def test_ranks_of_one_process_are_one_process() -> None:
    table = MemberTable.alone(members(1)[0], 1000)
    assert (len(table), table.num_processes(), table.num_on_host_of(999)) == (1000, 1, 1000)
    assert list(table.processes_on_host_of(5).values()) == [0]


def test_a_table_of_256_ranks_has_few_bytes_per_rank() -> None:
    """A packed member alone has 250; a boot's id, which is random, is shared by eight ranks."""
    assert len(MemberTable.of(members(RANKS)).pack()) < 16 * RANKS
