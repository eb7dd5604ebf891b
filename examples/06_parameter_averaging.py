"""Averaging parameters instead of gradients: the same at every step, cheaper if done rarely.

Averaging can come before the optimizer's step (of the gradients, example 05) or after it (of the
parameters). For plain SGD, w - lr * g, the two are the same thing, because the step is linear in
the gradient: this program does both and compares.

What makes parameter averaging interesting is that it need not be done at every step. Ranks may take
k steps on their own and average then ("local SGD"): k times less communication, at the price that
the replicas drift apart in between. It is then a different algorithm, not an equal one, and it is
also different with optimizers that keep state (momentum, Adam) unless that is averaged too.

    dure run --nproc 2 examples/06_parameter_averaging.py
"""

import torch
from torch import nn

import dure as dist
from dure.data import Images, load_digits

STEPS, BATCH, LR = 240, 32, 0.2


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def average_parameters(model: nn.Module) -> None:
    """Replace each parameter by its mean over the ranks, in one all_reduce for all of them."""
    with torch.no_grad():
        parameters = list(model.parameters())
        flat = torch.cat([p.flatten() for p in parameters])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for parameter, mean in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.copy_(mean.view_as(parameter))


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def spread(model: nn.Module) -> float:
    """Return how far the ranks' parameters are from each other, at most."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low).max().item()


def train(data: Images, every: int, of_gradients: bool = False) -> tuple[nn.Module, float]:
    """Train; return the model and how far the ranks had drifted apart at the most."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))[rank::size]
    model = build_model()
    drift = 0.0
    for step in range(1, STEPS + 1):
        chosen = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        loss = nn.functional.cross_entropy(model(data.pixels[chosen]), data.labels[chosen])
        model.zero_grad()
        loss.backward()
        if of_gradients:
            average_gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LR * parameter.grad)
        if not of_gradients and step % every == 0:
            drift = max(drift, spread(model))
            average_parameters(model)
    return model, drift


def accuracy(model: nn.Module, test: Images) -> float:
    return (model(test.pixels).argmax(1) == test.labels).float().mean().item()


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()

    by_gradients, _ = train(digits.train, every=1, of_gradients=True)
    by_parameters, _ = train(digits.train, every=1)
    for a, b in zip(by_gradients.parameters(), by_parameters.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # they differ by rounding alone

    results = [("gradients, every step", 0.0, accuracy(by_gradients, digits.test))]
    for every in (1, 8, 40):
        model, drift = train(digits.train, every)
        assert spread(model) == 0.0, "the last averaging must leave all ranks with the same model"
        assert every == 1 or size == 1 or drift > 0
        results.append((f"parameters, every {every}", drift, accuracy(model, digits.test)))
    if rank == 0:
        print(f"{'averaged over ' + str(size) + ' ranks':26}  largest drift  test accuracy")
        for name, drift, reached in results:
            print(f"{name:26}  {drift:13.4f}  {reached:13.1%}")
    assert all(reached > 0.85 for _, _, reached in results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
