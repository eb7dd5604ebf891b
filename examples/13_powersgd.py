"""PowerSGD: gradients sent as products of thin matrices; what it saves, and what it costs.

Between hosts the network can be what a step waits for. A communication hook changes how DDP sends
a bucket of gradients, in one line: `ddp.register_comm_hook(state, hook)`. This program trains one
model with four of them, and shows the bytes that each rank sent and the accuracy that was reached:

    none      32 bits a gradient
    fp16      16 bits
    PowerSGD  matrices of rank 2, with what was not sent added to the next step's gradients
    PowerSGD, but without that "error feedback": the same bytes, and a worse model

The first steps are sent as they are, because gradients change fast in them. Inside one host there
is no network, and none of this pays: see docs/hooks.md for when it does.

    dure run --nproc 2 examples/13_powersgd.py
"""

import torch
from torch import nn

import dure as dist
from dure.data import Images, load_digits
from dure.testing import CommRecorder

STEPS, BATCH, START = 150, 64, 15


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model: nn.Module, test: Images) -> float:
    with torch.no_grad():
        return (model(test.pixels).argmax(1) == test.labels).float().mean().item()


def train(data: Images, hook: object, state: object) -> tuple[nn.Module, int]:
    """Train with a hook; return the model, and the bytes that this rank sent in its last step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))[rank::size]
    batch = BATCH // size
    ddp = dist.DistributedDataParallel(build_model())
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    sent = 0
    for step in range(STEPS):
        chosen = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        loss = nn.functional.cross_entropy(ddp(data.pixels[chosen]), data.labels[chosen])
        optimizer.zero_grad()
        with CommRecorder() as seen:  # it listens to what this rank communicates
            loss.backward()
        sent = seen.nbytes()
        optimizer.step()
    return ddp.module, sent


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    digits = load_digits()

    def power(feedback: bool) -> dist.PowerSGDState:
        return dist.PowerSGDState(
            None,  # the ranks of the DDP module
            matrix_approximation_rank=2,
            start_powerSGD_iter=START,
            use_error_feedback=feedback,
        )

    kinds = {
        "none": (None, None),
        "fp16": (dist.fp16_compress_hook, None),
        "PowerSGD, rank 2": (dist.powerSGD_hook, power(True)),
        "without feedback": (dist.powerSGD_hook, power(False)),
    }
    found: dict[str, tuple[int, float]] = {}
    for name, (hook, state) in kinds.items():
        model, sent = train(digits.train, hook, state)
        found[name] = sent, accuracy(model, digits.test)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = flat.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(flat, first), "all ranks must end with the same model"

    if dist.get_rank() == 0:
        print(f"{'hook':18} bytes a step  test accuracy   ({dist.get_world_size()} ranks)")
        for name, (sent, reached) in found.items():
            print(f"{name:18} {sent:12}  {reached:13.1%}")
    assert found["fp16"][0] < 0.51 * found["none"][0]
    assert found["PowerSGD, rank 2"][0] < 0.15 * found["none"][0]
    assert min(found[name][1] for name in ("none", "fp16", "PowerSGD, rank 2")) > 0.92
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
