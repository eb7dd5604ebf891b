"""Each worker trains a net by DDP, and serves another net to the other: DDP's gradients need it.

While DDP waits in one worker for the gradients of the other, that one waits for this one's net.
"""

import torch

import dure as dist
from dure import autograd, rpc

torch.set_num_threads(1)
served = torch.nn.Linear(2, 2, bias=False)
served.weight.data.fill_(1.0)


def serve(x: torch.Tensor) -> torch.Tensor:
    return served(x)


dist.init_process_group()
rank = dist.get_rank()
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
mine = torch.nn.Linear(2, 2, bias=False)
net = dist.DistributedDataParallel(mine)
for _ in range(10):
    with autograd.context() as context:
        there = rpc.rpc_sync(f"worker{1 - rank}", serve, (net(torch.full((1, 2), rank + 1.0)),))
        autograd.backward(context, [there.sum()])
        gradients = autograd.get_gradients(context)
    # each output counts twice, by the weights of ones there; its inputs are 1 and 2: 3 on average
    assert torch.equal(gradients[mine.weight], torch.full((2, 2), 3.0)), gradients
rpc.shutdown()
print("ended")
