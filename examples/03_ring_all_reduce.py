"""An all_reduce of our own, made of point-to-point messages: the simple ring.

The ranks stand in a ring. In every step each rank passes on to its right the tensor that it has
just received from its left (in the first step, its own), and adds what comes in to its sum:

    step 1:   0 --a--> 1 --b--> 2 --c--> 0        rank 1 holds b + a
    step 2:   0 --c--> 1 --a--> 2 --b--> 0        rank 1 holds b + a + c: done

After n - 1 steps every tensor has visited every rank.

Cost: n - 1 steps, and each rank sends (n - 1) * S bytes for a tensor of S bytes. The amount grows
with the number of ranks, although the result does not; example 04 removes that flaw.

    dure run --nproc 3 examples/03_ring_all_reduce.py
"""

import torch

import dure as dist


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace `tensor` on every rank by the sum over all ranks; return the bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    passing_on, coming_in = tensor.clone(), torch.empty_like(tensor)
    sent = 0
    for _ in range(size - 1):
        # isend, so that all ranks can send at once: with send, each might wait for its neighbour.
        sending = dist.isend(passing_on, dst=right)
        dist.recv(coming_in, src=left)
        sending.wait()
        sent += passing_on.nbytes
        tensor += coming_in
        # Two buffers that change places: what came in is passed on next.
        passing_on, coming_in = coming_in, passing_on
    return sent


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in [(1,), (1000,), (3, 5, 7), (0,)]:
        ours = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + rank
        theirs = ours.clone()
        sent = ring_all_reduce(ours)
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs), "the two sums differ"
        assert sent == (size - 1) * ours.nbytes
        if rank == 0:
            print(f"shape {shape}: right; each rank sent {sent} bytes in {size - 1} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
