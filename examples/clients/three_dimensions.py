"""Tensor, pipeline and data parallel at once, as picotron does it: groups, collectives, no classes.

One number per dimension, in the order dp, pp, tp; with `--dure` the names are Dure's own.

dure run --stand-in-gloo --nproc 8 examples/clients/three_dimensions.py 2 2 2
dure run --nproc 8 examples/clients/three_dimensions.py 2 2 2 --dure
"""

import sys

import torch
from torch import nn

if "--dure" in sys.argv:
    import dure as dist
else:
    import torch.distributed as dist

SIZES = [int(word) for word in sys.argv[1:4]]
DP, PP, TP = SIZES
WIDTH, LAYERS, MICROBATCHES, ROWS = 16, 4, 4, 3

dist.init_process_group(None if "--dure" in sys.argv else "gloo")
mesh = torch.arange(DP * PP * TP).view(DP, PP, TP)
dp, pp, tp = (int(i) for i in (mesh == dist.get_rank()).nonzero()[0])
# Every rank makes every group, and keeps its own.
dp_group = [dist.new_group(mesh[:, i, j].tolist()) for i in range(PP) for j in range(TP)]
dp_group = dp_group[pp * TP + tp]
tp_group = [dist.new_group(mesh[i, j].tolist()) for i in range(DP) for j in range(PP)]
tp_group = tp_group[dp * PP + pp]
before, after = (int(mesh[dp, (pp + step) % PP, tp]) for step in (-1, 1))


class Copy(torch.autograd.Function):
    """The input of a part: its gradient is the sum of all parts'."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=tp_group)
        return gradient


class Sum(torch.autograd.Function):
    """The sum of the outputs of all parts."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x, group=tp_group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Layer(nn.Module):
    """Two matrices: the first is divided by columns, the second by rows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        up = torch.randn(4 * WIDTH, WIDTH, generator=generator) / 8
        down = torch.randn(WIDTH, 4 * WIDTH, generator=generator) / 8
        self.up = nn.Parameter(up.chunk(TP, 0)[tp].clone())
        self.down = nn.Parameter(down.chunk(TP, 1)[tp].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Sum.apply(torch.tanh(Copy.apply(x) @ self.up.T) @ self.down.T)


share = LAYERS // PP
stage = nn.Sequential(*map(Layer, range(pp * share, (pp + 1) * share)))
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
losses = []
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(DP * MICROBATCHES, ROWS, WIDTH, generator=generator)
    inputs, outputs, loss = [], [], torch.zeros(())
    for x in data.chunk(DP)[dp]:
        if pp > 0:
            x = torch.empty(ROWS, WIDTH)
            dist.recv(x, before)
        inputs.append(x.requires_grad_())
        outputs.append(stage(x))
        if pp < PP - 1:
            dist.send(outputs[-1].detach(), after)
    for x, y in zip(inputs, outputs, strict=True):
        if pp == PP - 1:
            part = y.square().mean() / MICROBATCHES
            loss += part.detach()
            part.backward()
        else:
            gradient = torch.empty(ROWS, WIDTH)
            dist.recv(gradient, after)
            y.backward(gradient)
        if pp > 0:
            dist.send(x.grad, before)
    for p in stage.parameters():
        dist.all_reduce(p.grad, group=dp_group)
        p.grad /= DP
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, group=dp_group)
    losses.append(loss.item() / DP)

weights = torch.tensor(sum(p.detach().double().square().sum() for p in stage.parameters()))
dist.all_reduce(weights)
if pp == PP - 1 and tp == 0 and dp == 0:
    print("losses", *losses, "weights", weights.item() / DP)
dist.destroy_process_group()
