"""Every collective, drawn: what each rank holds before the call, and after it.

A *collective* is an operation in which all ranks of a group take part: all call it, in the same
order. The ten below are all there are; training in parallel is made of them. Each function runs
one and checks the result; rank 0 draws what all ranks held. A dot is an element whose value does
not matter.

    dure run --nproc 2 examples/02_collectives.py           (try --nproc 4, the drawings grow)
"""

import math

import torch

import dure as dist


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def text(tensor: torch.Tensor | None) -> str:
    """Write a tensor as ``[ 1  2 ]``, and NaN, which marks what does not matter, as a dot."""
    if tensor is None:
        return "-"
    numbers = [" ." if math.isnan(x) else f"{x:2.0f}" for x in tensor.flatten().tolist()]
    return f"[{' '.join(numbers)}]"


def draw(title: str, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
    rows: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(rows, (text(before), text(after)))
    if dist.get_rank() == 0:
        width = max(len(row[0]) for row in rows)
        print(f"\n{title}")
        for rank, (left, right) in enumerate(rows):
            print(f"   rank {rank}   {left:<{width}}  -->  {right}")


def broadcast(rank: int, _: int) -> None:
    x = values(1, 2, 3) if rank == 0 else torch.full((3,), torch.nan)
    before = x.clone()
    dist.broadcast(x, src=0)
    assert x.tolist() == [1, 2, 3]
    draw("broadcast: everyone gets what rank 0 has", before, x)


def reduce(rank: int, size: int) -> None:
    x = values(rank, 1)
    before = x.clone()
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    assert rank != 0 or x.tolist() == [size * (size - 1) / 2, size]
    draw("reduce: rank 0 gets the sum", before, x if rank == 0 else None)


def all_reduce(rank: int, size: int) -> None:
    x = values(rank, 1)
    before = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    assert x.tolist() == [size * (size - 1) / 2, size]
    draw("all_reduce: everyone gets the sum (also MAX, MIN, PRODUCT, AVG, ...)", before, x)


def gather(rank: int, size: int) -> None:
    x = values(rank, rank)
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, dst=0)
    result = torch.cat(parts) if parts else None
    assert result is None or result.tolist() == [r for r in range(size) for _ in "ab"]
    draw("gather: rank 0 gets everyone's", x, result)


def all_gather(rank: int, size: int) -> None:
    x, result = values(rank, rank), torch.empty(2 * size)
    dist.all_gather_single(result, x)  # dist.all_gather does the same into a list of tensors
    assert result.tolist() == [r for r in range(size) for _ in "ab"]
    draw("all_gather: everyone gets everyone's", x, result)


def scatter(rank: int, size: int) -> None:
    parts = [values(10 * r, 10 * r + 1) for r in range(size)] if rank == 0 else None
    x = torch.empty(2)
    dist.scatter(x, parts, src=0)
    assert x.tolist() == [10 * rank, 10 * rank + 1]
    draw("scatter: rank 0 deals out what it has", torch.cat(parts) if parts else None, x)


def reduce_scatter(rank: int, size: int) -> None:
    x, result = torch.arange(float(size)) + rank, torch.empty(1)
    dist.reduce_scatter_single(result, x)
    assert result.item() == sum(rank + r for r in range(size))
    draw("reduce_scatter: each rank gets its part of the sum", x, result)


def all_to_all(rank: int, size: int) -> None:
    x, result = torch.arange(float(size)) + 10 * rank, torch.empty(size)
    dist.all_to_all_single(result, x)
    assert result.tolist() == [10 * r + rank for r in range(size)]
    draw("all_to_all: part j of rank i goes to part i of rank j (a transposition)", x, result)


def uneven_all_to_all(rank: int, size: int) -> None:
    x = torch.full((size * (size + 1) // 2,), float(rank))
    result = torch.empty(size * (rank + 1))
    dist.all_to_all_single(
        result, x, output_split_sizes=[rank + 1] * size, input_split_sizes=list(range(1, size + 1))
    )
    assert result.tolist() == [r for r in range(size) for _ in range(rank + 1)]
    draw("all_to_all with uneven parts: rank j gets j + 1 elements from each", x, result)


def barrier(rank: int, _: int) -> None:
    dist.barrier()
    if rank == 0:
        print("\nbarrier: moves nothing; nobody goes on before everyone has come")


def main() -> None:
    dist.init_process_group()
    for collective in (
        broadcast,
        reduce,
        all_reduce,
        gather,
        all_gather,
        scatter,
        reduce_scatter,
        all_to_all,
        uneven_all_to_all,
        barrier,
    ):
        collective(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
