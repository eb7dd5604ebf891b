"""Local SGD: ranks that train by themselves and meet now and then; four ways to do it.

DDP meets at every step. Where the network between hosts is slow, ranks can take several steps of
their own, and average models in place of gradients:

    DDP            gradients are averaged at every step: the yardstick
    post-local     DDP for a while; then models are averaged every 8 steps
    hierarchical   pairs average every 4 steps, all ranks every 16
    DiLoCo         every 20 steps an outer optimizer with momentum steps with the mean movement

With post-local SGD, `post_localSGD_hook` makes DDP average gradients over all ranks at first, and
then only within a subgroup: those of one host, where communication is cheap. Here each rank plays a
host, so there is nothing to average in it. The bytes are those that one rank sent in all.

    dure run --nproc 2 examples/14_local_sgd.py
"""

from collections.abc import Callable

import torch
from torch import nn

import dure as dist
from dure.algorithms.model_averaging.utils import average_parameters
from dure.data import Images, load_digits
from dure.testing import CommRecorder

STEPS, BATCH, WARMUP = 160, 64, 32


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def accuracy(model: nn.Module, test: Images) -> float:
    with torch.no_grad():
        return (model(test.pixels).argmax(1) == test.labels).float().mean().item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Images) -> int:
    """Train on this rank's part of the data; return the bytes that this rank sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))[rank::size]
    batch = BATCH // size
    with CommRecorder() as seen:
        for step in range(STEPS):
            chosen = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
            loss = nn.functional.cross_entropy(model(data.pixels[chosen]), data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen.nbytes()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = dist.DistributedDataParallel(build_model())
    return model, sgd(model)


def post_local() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = dist.DistributedDataParallel(build_model())
    state = dist.PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, dist.post_localSGD_hook)
    averager = dist.PeriodicModelAverager(period=8, warmup_steps=WARMUP)
    return model, dist.PostLocalSGDOptimizer(sgd(model), averager)


def hierarchical() -> tuple[nn.Module, torch.optim.Optimizer]:
    size = dist.get_world_size()
    levels = {4: 2, 16: size} if size > 2 and size % 2 == 0 else {8: size}
    model = build_model()
    return model, dist.PostLocalSGDOptimizer(sgd(model), dist.HierarchicalModelAverager(levels))


def diloco() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model()
    return model, dist.DiLoCo(sgd(model), period=20, dtype=torch.bfloat16)


def agree(model: nn.Module) -> bool:
    """Tell whether all ranks have the same model."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, src=0)
    return torch.equal(flat, first)


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    digits = load_digits()
    ways: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
        "DDP": ddp,
        "post-local": post_local,
        "hierarchical": hierarchical,
        "DiLoCo": diloco,
    }
    found: dict[str, tuple[int, float]] = {}
    for name, make in ways.items():
        model, optimizer = make()
        sent = train(model, optimizer, digits.train)
        average_parameters(list(model.parameters()))  # the model of all, whoever stepped last
        assert agree(model)
        found[name] = sent, accuracy(model, digits.test)
    if dist.get_rank() == 0:
        print(f"{'':14} kB sent  test accuracy   ({dist.get_world_size()} ranks)")
        for name, (sent, reached) in found.items():
            print(f"{name:14} {sent / 1000:7.0f}  {reached:13.1%}")
    if dist.get_world_size() > 1:
        assert found["DiLoCo"][0] < found["hierarchical"][0] < found["DDP"][0]
        assert found["post-local"][0] < 0.5 * found["DDP"][0]
    assert min(reached for _, reached in found.values()) > 0.9
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
