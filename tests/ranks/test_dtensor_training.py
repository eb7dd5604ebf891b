"""A transformer block on DTensors against one rank: loss and gradients, over data and model."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dure.tensor import Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from ranks.parts import made

R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
# Of the axis that cuts the model: what is not named is whole on each rank.
MEGATRON = {
    "table.weight": ROWS,
    "query.weight": ROWS, "key.weight": ROWS, "value.weight": ROWS,
    "query.bias": ROWS, "key.bias": ROWS, "value.bias": ROWS,
    "out.weight": COLUMNS,
    "up.weight": ROWS, "up.bias": ROWS,
    "down.weight": COLUMNS,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, words=11, width=8, heads=4):
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(words, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.table(tokens)
        h = self.before(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.2)
        return self.head(x + self.down(F.gelu(self.up(self.between(x)))))


def train(block, tokens, targets):
    torch.manual_seed(4)
    loss = F.cross_entropy(block(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("sizes", "batch", "model"),
    [
        ((3,), [ROWS], [{}]),
        ((2,), [R], [MEGATRON]),
        ((4,), [R], [MEGATRON]),
        ((2, 2), [ROWS, R], [{}, MEGATRON]),
        ((2, 2), [ROWS, ROWS], [{}, {}]),
    ],
    ids=["data 3", "tensor 2", "tensor 4", "data x tensor", "data x data"],
)
def test_a_block_trains_as_on_one_rank(sizes, batch, model):
    torch.manual_seed(0)
    alone = Block().double()
    tokens, targets = torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6))
    targets[1:3, 2:] = -100  # ranks average over different numbers of targets
    block = copy.deepcopy(alone)
    expected = train(alone, tokens, targets)

    def body(rank):
        mesh = init_device_mesh("cpu", sizes)
        mine = copy.deepcopy(block)
        for name, parameter in list(mine.named_parameters()):
            owner, last = mine.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            placements = [axis.get(name, R) for axis in model]
            setattr(owner, last, nn.Parameter(made(mesh, parameter.detach(), placements)))
        loss = train(mine, made(mesh, tokens, batch), made(mesh, targets, batch))
        torch.testing.assert_close(loss.full_tensor(), expected)
        for (name, parameter), one in zip(mine.named_parameters(), alone.parameters(), strict=True):
            assert not any(p.is_partial() for p in parameter.grad.placements), name
            torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, msg=name)

    run_ranks(torch.Size(sizes).numel(), body)
