"""Random programs of two models on the same ranks, in any order that a program may use them.

A program draws for each of some steps a model and an `Action`. Every rank does the same, each with
its own batches, and keeps beside each model a `Replica`: the full model, with the batches of all
ranks that train it together. Outputs, gradients and weights must be those of the replica.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dure as dist
from dure.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from dure.fsdp import fully_shard, strategy
from dure.tensor import distribute_tensor
from tests.parallel.fsdp.ranks.fsdp_models import Tensors, assert_same
from tests.parallel.fsdp.ranks.program_models import LOSSES, Net, Program, batch, made, shard

STEPS = 14
LR = 0.05
LAYOUTS = ["one group", "one group", "two axes", "replicas"]
"""Both models on all ranks; each on another axis of a 2x2 mesh; both replicated over an axis."""


class PlannedError(Exception):
    """Raised by all ranks in the middle of a forward or a backward."""


def raise_planned(*_: object) -> None:
    raise PlannedError


class Replica:
    """The model as each rank would have it in one process, trained with the batches of `ranks`."""

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        self.model, self.ranks = made(program), ranks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def add_gradients(self, loss: Callable[[Net, torch.Tensor], None], step: int) -> None:
        """Add the average gradient of the ranks' batches."""
        before = [p.grad for p in self.model.parameters()]
        self.model.zero_grad()
        for rank in self.ranks:
            loss(self.model, batch(step, rank))
        for parameter, old in zip(self.model.parameters(), before, strict=True):
            if parameter.grad is not None:
                parameter.grad /= len(self.ranks)
            if old is not None:
                parameter.grad = old if parameter.grad is None else old + parameter.grad


class Trained:
    """A sharded model, its optimizer, and a loss whose backward has not run, with its step."""

    def __init__(self, draw: random.Random, way: str, mesh: Any, ranks: Sequence[int]) -> None:
        program = Program.drawn(draw.randrange(10_000))
        self.model, self.replica = made(program), Replica(program, ranks)
        with strategy(way):
            if draw.random() < 0.5:
                fully_shard(self.model.head, mesh=mesh)  # of four ranks, two have no row of it
            shard(self.model, mesh=mesh)
        self.shards: dict[str, Any] = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.shards.values(), lr=LR)
        self.waiting: tuple[torch.Tensor, int] | None = None

    @property
    def hides_outputs(self) -> bool:
        """Whether modules return nothing, or tensors in objects that nothing can look into."""
        program = self.model.program
        return program.returns != "tensor" or any("box" in shape for shape in program.shapes)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.replica.optimizer.zero_grad()

    def compare(self, of: Callable[[Any], Any]) -> None:
        """Compare this rank's shards of what `of` returns of parameters, without messages."""
        found: Tensors = {}
        expected: Tensors = {}
        for (name, p), full in zip(
            self.shards.items(), self.replica.model.parameters(), strict=True
        ):
            part, wanted = of(p), of(full)
            found[name] = None if part is None else part.to_local().detach()
            expected[name] = None
            if wanted is not None:
                cut = distribute_tensor(
                    wanted.detach(), p.device_mesh, p.placements, src_data_rank=None
                )
                expected[name] = cut.to_local()
        assert_same(found, expected)


# ---------------------------------------------------------------- what a step may be
# Each takes the model, the number of the step, the rank and the program's draws.


def evaluate(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    with torch.no_grad():
        it.model(batch(step, rank))
        it.replica.model(batch(step, rank))
    torch.testing.assert_close(it.model.out, it.replica.model.out)


def forward(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    """With gradients; a backward may follow or not."""
    it.model(batch(step, rank))
    it.waiting = it.model.out.square().mean(), step


def backward(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    """Of a forward that may have been some steps ago."""
    if it.waiting is None:
        forward(it, step, rank, draw)
    assert it.waiting is not None
    (loss, began), it.waiting = it.waiting, None
    loss.backward()
    it.replica.add_gradients(LOSSES["backward_of_output"], began)
    it.compare(lambda p: p.grad)


def train(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    if it.hides_outputs:
        it.waiting = None  # its backward would not be noticed in time, and this one frees wholes
    loss = LOSSES[draw.choice(list(LOSSES))]
    loss(it.model, batch(step, rank))
    it.replica.add_gradients(loss, step)
    it.compare(lambda p: p.grad)


def optimize(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    it.waiting = None  # its gradients would be those of other values
    it.optimizer.step()
    it.replica.optimizer.step()
    it.zero_grad()
    it.compare(lambda p: p)


def load(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    """From rank 0, which has other full values."""
    it.waiting = None
    values = torch.Generator().manual_seed(step)
    full = {
        name: torch.randn(p.shape, generator=values, dtype=p.dtype)
        for name, p in it.replica.model.named_parameters()
    }
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(it.model, full if rank == 0 else {}, options=options)
    it.replica.model.load_state_dict(full)
    it.compare(lambda p: p)


def raise_in_forward(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    modules = [m for m in it.model.modules() if m is not it.model and list(m.children()) == []]
    fails(it, draw.choice(modules).register_forward_hook(raise_planned), step, rank)


def raise_in_backward(it: Trained, step: int, rank: int, draw: random.Random) -> None:
    def hook(*_: object) -> None:
        it.model.begin.register_hook(raise_planned)

    fails(it, it.model.head.register_forward_hook(hook), step, rank)


def fails(it: Trained, handle: Any, step: int, rank: int) -> None:
    it.waiting = None
    try:
        it.model(batch(step, rank))
        it.model.out.square().mean().backward()
    except PlannedError:
        pass
    else:
        raise AssertionError("no error was raised")
    finally:
        handle.remove()
    it.zero_grad()


ACTIONS = {
    evaluate: 2,
    forward: 3,
    backward: 4,
    train: 3,
    optimize: 3,
    load: 2,
    raise_in_forward: 1,
    raise_in_backward: 1,
}
"""What a step may be, and how often it is drawn; a model may also be deleted."""


def run(rank: int, seed: int) -> list[str]:
    """Run the program of a seed on four ranks; return what it did."""
    draw, own = random.Random(seed), random.Random(100 * seed + rank)
    layout = draw.choice(LAYOUTS)
    meshes, groups = _layout(layout, rank)
    ways = [draw.choice(["shared", "gathered"]) for _ in range(2)]
    models: list[Trained | None] = [None, None]
    done = [f"{layout} {ways}"]
    for step in range(STEPS):
        which = draw.randrange(2)
        if models[which] is not None and draw.random() < 0.08:
            done.append(f"delete {which}")
            models[which] = None
            if own.random() < 0.5:  # ranks free memory at different times
                gc.collect(1)
            continue
        model = models[which]
        if model is None:
            done.append(f"make {which}")
            model = models[which] = Trained(draw, ways[which], meshes[which], groups[which])
            if draw.random() < 0.5:
                done.append(f"load {which}")
                load(model, 1000 * seed + step, rank, draw)
        action = draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        done.append(f"{action.__name__} {which}")
        try:
            action(model, 1000 * seed + step, rank, draw)
        except BaseException as error:
            error.add_note(f"seed {seed}, after {', '.join(done)}; {model.model.program}")
            raise
        del model
    return done


def _layout(layout: str, rank: int) -> tuple[list[Any], list[Sequence[int]]]:
    """Return the mesh of each model, and the ranks that train it together with this one."""
    if layout == "one group":
        return [None, None], [range(4)] * 2
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if layout == "replicas":
        return [mesh, mesh], [range(4)] * 2
    return [mesh["a"], mesh["b"]], [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
