"""Smoke test of an installed Dure: two ranks do a little of everything, in less than two minutes.

    python smoke.py

It stands alone, beside the wheels: nothing of a checkout is needed but this file. One job, started
by `dure run`, does what its two ranks can do, and compares with numbers that were worked out by
hand; others are for what belongs to a job. It ends with 1 where anything failed.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dure as dist

DURE = os.path.join(sysconfig.get_path("scripts"), "dure")
LIMIT_S = 100
ISAS = ("generic", "avx2", "avx512")


# ---- what the ranks do ---------------------------------------------------------------------------


def collectives(rank: int) -> None:
    """Every kind of collective over the engine and over gloo, and a group of one."""
    for backend in ("shm", "gloo"):
        group = dist.new_group([0, 1], backend=backend)
        mine = torch.tensor([1.0, 2.0]) * (rank + 1)
        x = mine.clone()
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3, 6]
        x = mine.clone()
        dist.broadcast(x, src=1, group=group)
        assert x.tolist() == [2, 4]
        part = torch.empty(1)
        dist.reduce_scatter_single(part, mine, group=group)
        assert part.tolist() == [[3.0], [6.0]][rank]
        both = torch.empty(4)
        dist.all_gather_single(both, mine, group=group)
        assert both.tolist() == [1, 2, 2, 4]
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, mine, group=group)
        assert swapped.tolist() == [[1, 2], [2, 4]][rank]
        if rank == 0:
            dist.send(mine, dst=1, group=group)
        else:
            dist.recv(x, src=0, group=group)
            assert x.tolist() == [1, 2]
        told: list[object] = [None, None]
        dist.all_gather_object(told, {"rank": rank}, group=group)
        assert told == [{"rank": 0}, {"rank": 1}]
        dist.barrier(group=group)
    alone = dist.new_group([1])
    if rank == 1:
        x = torch.ones(3)
        dist.all_reduce(x, group=alone)
        assert x.tolist() == [1, 1, 1]


def engine(rank: int) -> None:
    """The engine is what one host gets. Its sums are the same bits whatever it computes with."""
    assert dist.get_backend() == "shm"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
        dist.all_reduce(x)
        if rank == 0:
            print(f"sums {hashlib.sha256(bytes(x.view(torch.uint8).tolist())).hexdigest()}")


def ddp(rank: int) -> None:
    """Y = w x with w = 1, inputs 1 and 3: the gradients of y^2 / 2 are 1 and 9, their mean 5."""
    model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.tensor([[1.0 + 2 * rank]])).square() / 2).sum().backward()
    optimizer.step()
    assert model.module.weight.item() == 0.5


def fsdp(rank: int) -> None:
    """The same with a row of the weight on each rank: both rows see both inputs."""
    from dure.fsdp import fully_shard  # as a user who has need of it

    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.tensor([[1.0 + 2 * rank]])).square() / 2).sum().backward()
    optimizer.step()
    (weight,) = model.parameters()
    assert weight.to_local().tolist() == [[0.5]]
    assert weight.full_tensor().tolist() == [[0.5], [0.5]]


def dtensor(rank: int) -> None:
    """[[0 1 2] [3 4 5]] times ones, its rows divided."""
    from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(0)])
    ones = distribute_tensor(torch.ones(3, 1), mesh, [Replicate()])
    y = x @ ones
    assert y.to_local().tolist() == [[[3.0]], [[12.0]]][rank]
    assert y.sum().full_tensor().item() == 15


def pipeline(rank: int) -> None:
    """Two stages that double: 4 y^2 of inputs 1 to 4 is in the mean 120, dloss/dw of each 240."""
    from dure.pipelining import PipelineOptions, PipelineStage, Schedule1F1B

    stage = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(stage.weight, 2.0)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, 2, torch.device("cpu")),
        4,
        lambda y, target: (y - target).square().mean(),
        options=PipelineOptions(losses_everywhere=True),
    )
    inputs = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    losses: list[torch.Tensor] = []
    schedule.step(*([inputs] if rank == 0 else []), target=torch.zeros(4, 1), losses=losses)
    # y = 4 x; y^2 = 16, 64, 144, 256
    assert torch.stack(losses).tolist() == [16, 64, 144, 256]
    # y^2 = w1^2 w2^2 x^2; by one w: 2 w * 4 * x^2 = 16 x^2; in the mean 16 * 30 / 4
    assert stage.weight.grad is not None
    assert stage.weight.grad.item() == 120


def rpc(rank: int) -> None:
    """A call, a reference, and what it refers to."""
    from dure import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)).tolist() == [4, 4]
        kept = rpc.remote("worker1", torch.zeros, args=(2, 2))
        assert kept.to_here().tolist() == [[0, 0], [0, 0]]
    rpc.shutdown()


def checkpoint(rank: int) -> None:
    """What both ranks save in parts comes back, and so does the optimizer's state."""
    from dure.checkpoint import load, save
    from dure.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    folder = os.environ["SMOKE_FOLDER"]
    whole = torch.arange(6.0).view(2, 3)
    save({"x": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder)
    empty = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(1)])  # cut in the other way
    state = {"x": empty, "step": 0}
    load(state, checkpoint_id=folder)
    assert state["step"] == 7
    assert empty.full_tensor().equal(whole)


RANKS: dict[str, Callable[[int], None]] = {
    f.__name__: f for f in (collectives, engine, ddp, fsdp, dtensor, pipeline, rpc, checkpoint)
}


# ---- what starts them ----------------------------------------------------------------------------


def called(*words: str, may_end_with: tuple[int, ...] = (0,), isa: str = "") -> str:
    """Run `dure WORDS` in an empty folder; return its output. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [DURE, *words],
            cwd=folder,
            env=os.environ | {"SMOKE_FOLDER": os.path.join(folder, "saved"), "DURE_ISA": isa},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    if done.returncode not in may_end_with:
        raise RuntimeError(f"`dure {' '.join(words)}` ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def job(*names: str, isa: str = "") -> str:
    """Run what two ranks do, by name, as a job; return what it printed."""
    return called("run", "--nproc", "2", os.path.abspath(__file__), *names, isa=isa)


def version() -> str:
    """The command is that of the package."""
    said = called("version").splitlines()[0]
    assert said == f"dure {dist.__version__}", said
    return said


def doctor() -> str:
    """What it finds is of the machine, and no matter here; that all can be checked is Dure's."""
    said = called("doctor", may_end_with=(0, 1))
    assert "could not be checked" not in said, said
    return f"{len(said.splitlines())} lines"


def plan() -> str:
    """A planner that needs no machine."""
    words = "--schedule 1f1b --stages 4 --ranks 4 --microbatches 8"
    said = called("plan", "pipeline", *words.split())
    assert "1f1b" in said.lower(), said
    return ""


def ranks() -> str:
    """All that two ranks do; and the sums that this processor's best instructions have made."""
    said = job(*RANKS)
    assert all(f"{name}: ok" in said for name in RANKS), said
    return ", ".join(RANKS)


def instruction_sets() -> str:
    """The engine's sums are the same bits for each instruction set."""
    said = [job("engine", isa=isa).splitlines() for isa in ISAS]
    sums = [[line for line in lines if "sums " in line] for lines in said]
    assert len(sums[0]) == 3, said
    assert sums == [sums[0]] * len(ISAS), said
    return f"{', '.join(ISAS)}: the same bits"


def failure() -> str:
    """A rank that fails ends the job, and is told."""
    said = called("run", "--nproc", "2", os.path.abspath(__file__), "fails", may_end_with=(1,))
    assert "KeyError: 'fails'" in said, said
    return ""


CHECKS = (version, doctor, plan, ranks, instruction_sets, failure)


def main() -> int:
    """Run all checks; return 1 if any failed."""
    print(
        f"dure {dist.__version__} in {Path(dist.__file__).parent}\n"
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.uname().machine}"
    )
    failures, began = 0, time.monotonic()
    for check in CHECKS:
        start = time.monotonic()
        try:
            said, verdict = check(), "ok"
        except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
            said, verdict = f"{type(error).__name__}: {error}", "FAILED"
            failures += 1
        took = time.monotonic() - start
        print(f"{check.__name__:<18}{verdict:<8}{took:5.1f} s  {said}", flush=True)
    print(f"{failures} of {len(CHECKS)} failed, in {time.monotonic() - began:.0f} s")
    return int(failures > 0)


def one_rank(names: list[str]) -> None:
    """Do what one rank of a job does."""
    with dist.process_group():
        for name in names:
            RANKS[name](dist.get_rank())
            print(f"{name}: ok")


if __name__ == "__main__":
    if sys.argv[1:]:
        one_rank(sys.argv[1:])
    else:
        sys.exit(main())
