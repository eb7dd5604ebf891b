"""Messages between two ranks: blocking, non-blocking, and from anyone.

A *rank* is one of the processes that make up a job, known by its number. The simplest thing that
two of them can do is pass a tensor on. `send` returns when the tensor may be reused and `recv` when
the message has arrived; `isend` and `irecv` return at once, with a `Work` to wait for.

The rule for the second kind: until `wait()` has returned, the tensor belongs to the message. Do not
write one that is being sent, do not read one that is being received.

    dure run --nproc 2 examples/01_point_to_point.py        (any number of ranks from 2)
"""

import torch

import dure as dist


def chain(rank: int, size: int) -> None:
    """Blocking: a number travels from rank 0 to the last rank, and each rank adds one.

    0 --[1]--> 1 --[2]--> 2 --[3]--> ...
    """
    number = torch.zeros(1)
    if rank > 0:
        dist.recv(number, src=rank - 1)
    number += 1
    if rank < size - 1:
        dist.send(number, dst=rank + 1)
    assert number.item() == rank + 1
    print(f"rank {rank}: the number is {number.item():.0f} when it leaves me")


def ring(rank: int, size: int) -> None:
    """Non-blocking: every rank sends to its right and receives from its left, at the same time.

    If all ranks called a `send` that waits for its receiver, nobody would come to the `recv`.
    Started together, the two can end in any order, and other work fits in between.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    sending = dist.isend(mine, dst=right)
    receiving = dist.irecv(theirs, src=left)
    meanwhile = sum(range(1000))  # neither `mine` nor `theirs` is touched here
    sending.wait()
    receiving.wait()
    assert torch.equal(theirs, torch.full((3,), float(left)))
    print(f"rank {rank}: {theirs.tolist()} came from {left} while I counted to {meanwhile}")


def exchange(rank: int, size: int) -> None:
    """The same as one batch, which leaves the order of the operations to the library."""
    theirs = torch.empty(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([rank * 10.0]), (rank + 1) % size),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    assert theirs.item() == (rank - 1) % size * 10


def collect(rank: int, size: int) -> None:
    """From anyone: rank 0 takes answers in the order they come; tags keep two kinds apart."""
    question, answer = 1, 2
    if rank == 0:
        for peer in range(1, size):
            dist.send(torch.tensor([float(peer)]), dst=peer, tag=question)
        seen: dict[int, float] = {}
        for _ in range(1, size):
            number = torch.empty(1)
            peer = dist.recv(number, tag=answer)  # no src: whoever is first
            seen[peer] = number.item()
        assert seen == {peer: float(peer**2) for peer in range(1, size)}
        print(f"rank 0: squares came in from {sorted(seen)}")
    else:
        number = torch.empty(1)
        dist.recv(number, src=0, tag=question)
        dist.send(number**2, dst=0, tag=answer)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise SystemExit("nobody to talk to: start at least 2 ranks, with --nproc 2")
    for part in (chain, ring, exchange, collect):
        part(rank, size)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
