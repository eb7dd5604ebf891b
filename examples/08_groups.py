"""Groups: collectives among some of the ranks.

All collectives of the other examples ran in the *world*, the group of all ranks. A group of fewer
ranks has its own numbering: a process has a *global rank* in the world and a *rank* in each group
that it is a member of. Arguments such as `src` and `dst` are always global ranks; `group_src` and
`group_dst` are ranks of the group.

One rule is easily forgotten: every rank of the world calls `new_group`, also those that will not be
members. They get a placeholder back, on which every operation is refused.

    dure run --nproc 4 examples/08_groups.py                (any number of ranks from 2)
"""

import torch

import dure as dist


def even_and_odd(rank: int, size: int) -> None:
    """Two groups side by side; a rank is a member of one of them."""
    members = {0: list(range(0, size, 2)), 1: list(range(1, size, 2))}
    groups = {parity: dist.new_group(ranks) for parity, ranks in members.items()}  # all ranks call
    mine, other = groups[rank % 2], groups[1 - rank % 2]

    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mine)
    assert total.item() == sum(members[rank % 2])
    assert dist.get_rank(mine) == rank // 2
    assert dist.get_rank(other) == -1
    print(
        f"rank {rank} is rank {dist.get_rank(mine)} of {dist.get_world_size(mine)} among the "
        f"{'odd' if rank % 2 else 'even'} ones; their sum is {total.item():.0f}"
    )
    try:
        dist.all_reduce(total, group=other)
    except dist.NotInGroupError as error:
        refused = error
    assert refused.op == "all_reduce"  # a stranger is told so at once; nobody is kept waiting


def ranks_in_two_numberings(rank: int, size: int) -> None:
    """The same root, named by its rank in the group and by its global rank."""
    group = dist.new_group(range(1, size))
    if rank == 0:
        return
    last = dist.get_world_size(group) - 1
    assert dist.get_global_rank(group, last) == size - 1
    assert dist.get_group_rank(group, size - 1) == last
    word = torch.tensor([float(rank)])
    dist.broadcast(word, group_src=last, group=group)
    assert word.item() == size - 1
    word = torch.tensor([float(rank)])
    dist.broadcast(word, src=size - 1, group=group)
    assert word.item() == size - 1


def grid(rank: int, size: int) -> None:
    """A grid of 2 columns: each rank is in the group of its row and in that of its column.

    Sums along the rows and then along the columns are sums over all. Meshes for several kinds of
    parallelism are made this way.

            column 0   column 1
    row 0       0          1
    row 1       2          3
    """
    if size % 2:
        return
    row, _ = dist.new_subgroups(2)  # consecutive ranks: 0 1 | 2 3 | ...
    column, _ = dist.new_subgroups_by_enumeration(
        [list(range(c, size, 2)) for c in range(2)]  # any partition: 0 2 ... | 1 3 ...
    )
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=row)
    assert x.item() == 2 * (rank - rank % 2) + 1
    dist.all_reduce(x, group=column)
    assert x.item() == size * (size - 1) / 2
    if rank == 0:
        print(f"a grid of {size // 2} x 2 ranks: rows, then columns, sum up to {x.item():.0f}")
    dist.destroy_process_group(row)
    dist.destroy_process_group(column)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise SystemExit("groups of one are no groups: start at least 2 ranks, with --nproc 2")
    even_and_odd(rank, size)
    ranks_in_two_numberings(rank, size)
    grid(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
