"""The ring with chunks, as in Baidu's DeepSpeech: all links busy, and no byte sent twice.

The simple ring of example 03 sends whole tensors, so each rank sends n - 1 of them. Here the tensor
is cut into n *chunks*, one a rank, which travel round the ring one step behind each other.

Phase 1, reduce-scatter. In step s rank r sends chunk r - s and adds what comes in to chunk
r - s - 1 (all modulo n). A chunk grows by one rank's share at each stop; after n - 1 steps rank r
holds the finished sum of chunk r + 1. With n = 3, where a digit says whose share is in it:

               rank 0              rank 1              rank 2
    start      [0    ][0    ][0    ]   [1    ][1    ][1    ]   [2    ][2    ][2    ]
    step 1     [0    ][0    ][02   ]   [01   ][1    ][1    ]   [2    ][12   ][2    ]
    step 2     [0    ][012  ][02   ]   [01   ][1    ][012  ]   [012  ][12   ][2    ]

Phase 2, all-gather. The finished chunks go once more round the ring, and overwrite instead of add.

Cost: 2 * (n - 1) steps; each rank sends 2 * (n - 1) / n * S bytes. That is less than 2 * S however
many ranks there are, and no all_reduce can send less. Chunks need not be of equal size: a tensor
that n does not divide, or one with fewer elements than ranks, works the same.

    dure run --nproc 4 examples/04_ring_all_reduce_in_chunks.py
"""

import torch

import dure as dist


def pass_on(chunk: torch.Tensor, incoming: torch.Tensor) -> int:
    """Send `chunk` to the right while receiving `incoming` from the left; return bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(chunk, dst=(rank + 1) % size)
    dist.recv(incoming, src=(rank - 1) % size)
    sending.wait()
    return chunk.nbytes


def reduce_scatter_phase(chunks: list[torch.Tensor]) -> int:
    """Let each chunk collect all ranks' shares; rank r ends up with chunk r + 1 complete."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = 0
    for step in range(size - 1):
        grown, growing = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(growing)
        sent += pass_on(grown, incoming)
        growing += incoming  # a view of the caller's tensor: the sum lands in place
    return sent


def all_gather_phase(chunks: list[torch.Tensor]) -> int:
    """Bring the complete chunks to every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = 0
    for step in range(size - 1):
        complete, stale = chunks[(rank - step + 1) % size], chunks[(rank - step) % size]
        sent += pass_on(complete, stale)
    return sent


def chunked_all_reduce(tensor: torch.Tensor) -> int:
    """Replace the contiguous `tensor` by the sum over all ranks; return the bytes sent."""
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    return reduce_scatter_phase(chunks) + all_gather_phase(chunks)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, size - 1, size, size + 1, 1_000_003):
        ours = (torch.arange(count) % 1000 + rank).float()  # sums of these are exact
        theirs = ours.clone()
        sent = chunked_all_reduce(ours)
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs), "the two sums differ"
        total = torch.tensor([sent])
        dist.all_reduce(total)
        # Over all ranks: every chunk is sent n - 1 times in each phase.
        assert total.item() == 2 * (size - 1) * ours.nbytes
        if rank == 0:
            simple = (size - 1) * ours.nbytes
            print(f"{count:8} numbers: right; rank 0 sent {sent} bytes, the simple ring {simple}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
