"""Functional collectives: results that are returned, differentiated, and waited for where used.

The collectives of the other examples write into tensors that they are given. Those here return new
ones. That makes them operations like any other of torch:

* autograd goes through them: a loss on one rank gives gradients to the inputs of all ranks;
* the result comes at once, while the ranks still communicate; who first looks at it waits.

The program is a linear layer whose weight is divided among the ranks, by columns and then by rows:
the smallest form of tensor parallelism. It computes what one process would, and the same gradients.

    dure run --nproc 2 examples/20_functional.py            (any number of ranks)
"""

import torch

import dure as dist
from dure.comm import functional as F
from dure.nn import functional as nnF


def columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each rank has some outputs of the layer; gathered, they are all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = weight.chunk(size)[rank]
    everywhere = nnF.broadcast(x, 0)  # in backward: the sum of what all ranks want x to be
    return F.all_gather_tensor(everywhere @ mine.T, 1)


def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each rank has some inputs of the layer; the sum of what they make of them is the output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = x.chunk(size, 1)[rank] @ weight.chunk(size, 1)[rank].T
    return F.all_reduce(part, "sum")


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2 * size), torch.randn(2 * size, 2 * size)
    x, weight = x.round(decimals=2).double(), weight.round(decimals=2).double()

    alone = weight.clone().requires_grad_()
    (x @ alone.T).pow(2).sum().backward()

    for layer in (columns, rows):
        divided = weight.clone().requires_grad_()
        y = layer(x, divided)
        pending = type(y) is F.AsyncCollectiveTensor  # nobody has looked at it yet
        loss = y.pow(2).sum() / size  # every rank computes the whole loss: an n-th of it each
        assert type(y) is torch.Tensor  # it was used, and is an ordinary tensor now
        loss.backward()
        assert torch.allclose(y, x @ weight.T)
        assert divided.grad is not None
        assert alone.grad is not None
        dim = 0 if layer is columns else 1
        got, wanted = divided.grad.chunk(size, dim)[rank], alone.grad.chunk(size, dim)[rank]
        assert torch.allclose(got, wanted)
        if rank == 0:
            print(f"{layer.__name__}: pending at first: {pending}; gradients as in one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
