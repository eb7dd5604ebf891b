"""Train a Llama on text, parallel in every dimension: flags say how many ranks along each.

    dure run --nproc 8 examples/llm/train.py --pp 2 --fsdp 2 --tp 2 --schedule Interleaved1F1B

    --pp      stages of layers, in a pipeline          --cp   parts of the sequence
    --dp      replicas                                 --tp   parts of each layer
    --fsdp    parts of parameters and optimizer

Their product is the number of ranks. The losses are those of one rank, whatever the flags. With
--checkpoint a job saves, and goes on from what it finds there, with any other flags.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import SHAPES, Llama, plan
from torch import nn

import dure as dist
from dure.checkpoint import load, save
from dure.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from dure.data import read_python_sources
from dure.device_mesh import init_device_mesh
from dure.fsdp import MixedPrecisionPolicy, fully_shard
from dure.pipelining import PipelineStage
from dure.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from dure.tensor import DTensor, clip_grad_norm_
from dure.tensor.experimental import context_parallel, positions_of
from dure.tensor.parallel import loss_parallel, parallelize_module


@dataclass
class Flags:
    """What to train, and how: each field is a flag of the command line."""

    shape: str = "debug"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    schedule: str = "1F1B"
    microbatches: int = 4
    batch: int = 16  # sequences a step, of all ranks together
    steps: int = 20
    lr: float = 3e-3
    clip: float = 1.0
    dtype: str = "float32"  # of parameters and optimizer
    compute: str = ""  # of forward and backward, such as bfloat16
    seed: int = 0
    checkpoint: str = ""
    every: int = 10  # steps from save to save


AXES = ("pp", "dp", "fsdp", "cp", "tp")
V_SHAPED = ("zbvzerobubble", "dualpipev")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer:
    """One rank's part of the job: its stages, their optimizers, and the schedule."""

    def __init__(self, flags: Flags) -> None:
        self.flags, self.shape = flags, SHAPES[flags.shape]
        sizes = [getattr(flags, axis) for axis in AXES]
        self.mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=AXES)
        self.mesh["fsdp", "cp"]._flatten("shard")  # ranks of one sequence share parameters as well
        self.mesh["dp", "fsdp", "cp"]._flatten("data")
        self.positions = positions_of(self.shape.length, flags.cp, self.mesh.get_local_rank("cp"))

        self.stages = {number: self.stage(number) for number in self.numbers()}
        self.optimizers = [
            torch.optim.AdamW(stage.parameters(), lr=flags.lr) for stage in self.stages.values()
        ]
        kinds = [
            PipelineStage(
                stage, number, self.n_stages, torch.device("cpu"), group=self.mesh.get_group("pp")
            )
            for number, stage in self.stages.items()
        ]
        given = kinds if self.per_rank > 1 else kinds[0]
        self.schedule = self.kind(given, flags.microbatches, loss_fn=self.loss)
        self.step = 0

    # -- stages ------------------------------------------------------------------------------------

    @property
    def kind(self) -> Any:
        """The schedule's class."""
        return get_schedule_class(self.flags.schedule)

    @property
    def per_rank(self) -> int:
        """How many stages a rank has."""
        return 1 if issubclass(self.kind, PipelineScheduleSingle) else 2

    @property
    def n_stages(self) -> int:
        """How many stages there are."""
        return self.per_rank * self.flags.pp

    def numbers(self) -> list[int]:
        """Return this rank's stages: r and r + p, or in a V r and 2p - 1 - r."""
        rank, n = self.mesh.get_local_rank("pp"), self.flags.pp
        if self.flags.schedule.lower() in V_SHAPED:
            return [rank, 2 * n - 1 - rank]
        return [rank + i * n for i in range(self.per_rank)]

    def stage(self, number: int) -> nn.Module:
        """Make a stage: its layers, filled, divided along tp, and sharded over dp, fsdp and cp."""
        flags, shape, n = self.flags, self.shape, self.n_stages
        part = range(number * shape.layers // n, (number + 1) * shape.layers // n)
        stage = Llama(shape, part, self.positions).to(getattr(torch, flags.dtype))
        stage.reset_parameters(flags.seed)
        if flags.tp > 1:
            parallelize_module(stage, self.mesh["tp"], plan(stage))
        names = ("dp", "shard") if flags.dp > 1 else ("shard",)
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, flags.compute) if flags.compute else None,
            reduce_dtype=torch.float32 if flags.compute else None,
        )
        for layer in stage.layers.values():
            fully_shard(layer, mesh=self.mesh[names], mp_policy=policy)
        return fully_shard(stage, mesh=self.mesh[names], mp_policy=policy)

    # -- a step ------------------------------------------------------------------------------------

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's inputs and targets [n, t]: its rows, and its positions in them."""
        flags, length = self.flags, self.shape.length
        generator = torch.Generator().manual_seed(flags.seed * 1_000_003 + step)
        starts = torch.randint(len(TEXT) - length - 1, (flags.batch,), generator=generator)
        replica = self.mesh["dp", "fsdp"].get_coordinate() or [0, 0]
        mine = starts.chunk(flags.dp * flags.fsdp)[replica[0] * flags.fsdp + replica[1]]
        rows = torch.stack([TEXT[i : i + length + 1] for i in mine.tolist()]).long()
        return rows[:, :-1][:, self.positions], rows[:, 1:][:, self.positions]

    @staticmethod
    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over this microbatch's tokens."""
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """Attention goes around the ranks of a sequence; the loss is of divided scores."""
        with contextlib.ExitStack() as stack:
            if self.flags.cp > 1:
                stack.enter_context(context_parallel(self.mesh["cp"]))
            if self.flags.tp > 1:
                stack.enter_context(loss_parallel())
            yield

    def train(self) -> tuple[float, float]:
        """Make a step; return the loss of the whole batch and the norm of the gradients."""
        inputs, targets = self.batch(self.step)
        losses: list[torch.Tensor] = []
        is_first, is_last = 0 in self.stages, self.n_stages - 1 in self.stages
        with self.parallel():
            self.schedule.step(
                *([inputs] if is_first else []),
                target=targets if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
        norm = clip_grad_norm_(
            [p for stage in self.stages.values() for p in stage.parameters()],
            self.flags.clip,
            process_group=self.mesh.get_group("pp"),
        )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return self.mean(losses), norm.item()

    def mean(self, losses: list[torch.Tensor]) -> float:
        """Return the mean over microbatches and ranks, on all ranks: one exchange."""
        whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
        total = torch.stack(whole).mean().detach().double() if whole else torch.zeros(()).double()
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        dist.all_reduce(total, dist.ReduceOp.AVG, group=self.mesh.get_group("data"))
        return total.item()

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what is saved, by the whole model's names: the stages' number does not matter."""
        state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": self.step}
        for stage, optimizer in zip(self.stages.values(), self.optimizers, strict=True):
            weights, moments = get_state_dict(stage, optimizer, options=FLAT)
            state["model"] |= weights
            state["optimizer"] |= moments
        return state

    def save(self) -> None:
        """Save into the folder of --checkpoint."""
        save(self.state(), checkpoint_id=self.flags.checkpoint)

    def resume(self) -> None:
        """Go on from the folder of --checkpoint, whatever mesh it was saved from."""
        state = self.state()
        load(state, checkpoint_id=self.flags.checkpoint)
        for stage, optimizer in zip(self.stages.values(), self.optimizers, strict=True):
            weights, moments = get_state_dict(stage, optimizer, options=FLAT)
            set_state_dict(
                stage,
                optimizer,
                model_state_dict={name: state["model"][name] for name in weights},
                optim_state_dict={name: state["optimizer"][name] for name in moments},
                options=FLAT,
            )
        self.step = state["step"]


TEXT = torch.tensor(list(read_python_sources(200_000).encode()), dtype=torch.uint8)


def main() -> None:
    """Train, and print a line a step on one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Flags):
        choices = SHAPES if field.name == "shape" else None
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, choices=choices)
    flags = Flags(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group()
    trainer = Trainer(flags)
    if flags.checkpoint and Path(flags.checkpoint).exists():
        trainer.resume()
    while trainer.step < flags.steps:
        loss, norm = trainer.train()
        if dist.get_rank() == 0:
            print(f"step {trainer.step}: loss {loss:.6f}, norm {norm:.4f}", flush=True)
        if flags.checkpoint and trainer.step % flags.every == 0:
            trainer.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
