"""Optimizer in backward: each parameter is stepped as soon as its gradient is reduced, and freed.

Without it, backward keeps the gradients of all parameters until `optimizer.step()`. Here each
parameter has its own optimizer, and a hook steps it in backward. So only a few gradients exist at
a time, and there is no call of `step()` in the loop. This cannot be combined with clipping by the
norm of all gradients, with `GradScaler`, or with accumulation in `.grad`.

The check: one process trains with one optimizer after backward. The hook also counts how many
gradients exist at a time. The optimizers' state is saved and loaded under the parameters' names, so
a program with a single optimizer can continue from it.

    dure run --nproc 2 examples/recipes/optimizer_in_backward.py      (any number that divides 24)
"""

import torch
from torch import nn

import dure as dist
from dure.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from dure.fsdp import fully_shard, stream_full

STEPS, BATCH, WIDTH, LAYERS = 6, 24, 16, 8
FUSE = {"lr": 1e-2, "weight_decay": 0.1}


class StepsInBackward:
    """One AdamW per parameter, stepped by a hook when the parameter's gradient is complete.

    Args:
        parameters: Those to train; after `fully_shard`.
        options: Of AdamW.

    Attributes:
        optimizers: One for each parameter. For a schedule, make a scheduler for each.
        most: The largest number of gradients that existed at a time.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: float) -> None:
        self.parameters, self.most = parameters, 0
        self.optimizers = {p: torch.optim.AdamW([p], **options) for p in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        self.most = max(self.most, sum(p.grad is not None for p in self.parameters))
        self.optimizers[parameter].step()
        parameter.grad = None


def build() -> nn.Sequential:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*blocks).double()


def batches() -> torch.Tensor:
    rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return rows.expand(STEPS, BATCH, WIDTH)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.flip(1)).square().mean()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    model = build()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    in_backward = StepsInBackward(list(model.parameters()), **FUSE)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch.tensor_split(size)[rank])
        loss.backward()  # steps too
        losses.append(loss.item())
    losses = torch.tensor(losses, dtype=torch.double)
    dist.all_reduce(losses, dist.ReduceOp.AVG)

    alone = build()
    optimizer = torch.optim.AdamW(alone.parameters(), **FUSE)
    expected = []
    for batch in batches():
        loss = loss_of(alone, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    expected = torch.tensor(expected, dtype=torch.double)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, weight in stream_full(model):
        torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())

    # All optimizers' state in one dict, by the names of parameters; into a single optimizer.
    state = get_optimizer_state_dict(model, list(in_backward.optimizers.values()))
    single = torch.optim.AdamW(model.parameters(), **FUSE)
    set_optimizer_state_dict(model, single, state)
    for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
        moment = single.state[parameter]["exp_avg_sq"].full_tensor()
        torch.testing.assert_close(
            moment, optimizer.state[reference]["exp_avg_sq"], rtol=1e-9, atol=1e-15
        )

    count = len(in_backward.parameters)
    assert in_backward.most < count, "gradients of all parameters existed at once"
    if rank == 0:
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
        print(f"at most {in_backward.most} of {count} gradients existed at a time")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
