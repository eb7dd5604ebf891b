"""2 and 4 ranks on one GPU: what they get from each backend, and training."""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as stock
from torch import nn

import dure as dist
from gpu.checks import DEVICE, LIMIT_S, Refused, check, outcome, told
from gpu.measured import layers_of, step_time
from gpu.train import divided, saved_and_loaded, sharded, small_model, steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' conformance suite

STAGED = (None, "shm", "hybrid", "gloo", "cpu:shm,cuda:shm", "cuda:hybrid", "cuda:gloo")
REFUSED = ("nccl", "cpu:shm,cuda:nccl")
SUBJECTS = ("moving", "reducing", "layouts", "overlapping", "messages")
LIMIT = datetime.timedelta(seconds=LIMIT_S / 2)


def on_ranks(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a function returns on each of some ranks; raise the error of one that fails."""
    try:
        return dist.spawn(work, count, args)
    except dist.LaunchError as error:
        raise error.__cause__ or error from None


# ---- what each backend gives ---------------------------------------------------------------------


def _one_of_several(backend: str | None) -> tuple[str, str]:
    try:
        dist.init_process_group(backend, timeout=LIMIT)
        t = torch.full((3,), dist.get_rank() + 1.0, device=DEVICE)
        dist.all_reduce(t)
        size = dist.get_world_size()
        assert t.tolist() == [size * (size + 1) / 2] * 3, t
        said = str(dist.get_backend_config())
        dist.destroy_process_group()
        return "ok", said
    except Exception as error:
        return outcome(error, may_refuse=True), told(error)


def several(count: int, backend: str | None) -> None:
    """Add the check of some ranks that use one GPU over one backend."""

    def run() -> str:
        results = dist.spawn(_one_of_several, count, (backend,))
        worst = max(results, key=lambda r: ("ok", "refused", "FAILED").index(r[0]))
        if worst[0] != "ok":
            raise (Refused if worst[0] == "refused" else AssertionError)(worst[1])
        return worst[1]

    name = f"{count} ranks, {backend or 'no backend named'}"
    check("shared", name, cuda="cuda" in (backend or ""), may_refuse=backend in REFUSED)(run)


def _conformance(subject: str) -> list[str]:
    from tests.comm.conformance import suite

    dist.init_process_group("cpu:shm,cuda:shm" if DEVICE.type == "cuda" else "shm", timeout=LIMIT)
    with torch.device(DEVICE):
        ran = suite.run(dist.get_rank(), subject)
    dist.destroy_process_group()
    return ran


def conforms(count: int, subject: str) -> None:
    """Add the check of one subject of the suite that every backend passes, with CUDA tensors."""

    @check("shared", f"{count} ranks, every operation: {subject}")
    def run() -> str:
        return f"{len(on_ranks(count, _conformance, subject)[0])} cases"


# ---- training ------------------------------------------------------------------------------------


def trained(kind: str, folder: str) -> Any:
    """Train on each rank in one of several ways, and compare with one process."""
    dist.init_process_group(timeout=LIMIT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "tensor parallel":
        divided(ranks)
    elif kind == "checkpoint":
        saved_and_loaded(folder, ranks)
    elif kind == "pipeline":
        _pipeline(rank, ranks)
    else:
        make: dict[str, Callable[[], nn.Module]] = {
            "ddp": lambda: dist.DistributedDataParallel(small_model()),
            "fully_shard": sharded,
            "fully_shard, gathered": _gathered,
            "fully_shard, shared": partial(_gathered, "shared"),
        }
        losses = steps(make[kind](), rank, ranks)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        torch.testing.assert_close(losses, steps(small_model()), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def _gathered(name: str = "gathered") -> nn.Module:
    from dure import fsdp

    with fsdp.strategy(name):
        return sharded()


def _pipeline(rank: int, ranks: int) -> None:
    from dure.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    parts = [nn.Linear(16, 16).to(DEVICE) for _ in range(ranks)]
    x, target = torch.randn(8, 16, device=DEVICE), torch.zeros(8, 16, device=DEVICE)
    loss = lambda y, wanted: (y - wanted).square().mean()  # noqa: E731
    schedule = Schedule1F1B(PipelineStage(parts[rank], rank, ranks, DEVICE), 4, loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == ranks - 1:
        schedule.step(target=target, losses=losses)
        wanted = loss(nn.Sequential(*parts)(x), target)
        torch.testing.assert_close(torch.stack(losses).mean(), wanted, rtol=1e-5, atol=1e-6)
    else:
        schedule.step()


def trains(count: int, kind: str) -> None:
    """Add the check of one kind of training on ranks that share the GPU."""
    shares = kind.endswith("shared") and DEVICE.type == "cuda"

    @check("shared", f"{count} ranks, {kind}", may_refuse=shares)
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            on_ranks(count, trained, kind, folder)


KINDS = ("ddp", "fully_shard", "fully_shard, gathered", "fully_shard, shared", "tensor parallel")
for _count in (2, 4):
    for _spelling in (*STAGED, *REFUSED):
        several(_count, _spelling)
    for _subject in SUBJECTS:
        conforms(_count, _subject)
    for _kind in (*KINDS, "pipeline", "checkpoint"):
        trains(_count, _kind)


# ---- streams, threads, and stock PyTorch ---------------------------------------------------------


def _in_streams() -> None:
    dist.init_process_group("shm", timeout=LIMIT)
    rank = dist.get_rank()
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    x = torch.full((2048, 2048), 2.0**-11, device=DEVICE)
    for _ in range(10):
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            for _ in range(50):
                y = x @ x  # each element is 2**-11
            y += rank
            work = dist.all_reduce(y, async_op=True)
            late = torch.zeros(1 << 24, device=DEVICE)
            for _ in range(50):
                late += 1.0
            receive = dist.irecv(late, 1 - rank)
            dist.isend(torch.full((1 << 24,), rank + 5.0, device=DEVICE), 1 - rank).wait()
        for stream in (second, third):
            with torch.cuda.stream(stream):
                work.wait()
                receive.wait()
                assert y.eq(2.0**-10 + 1).all(), y
                assert late.eq(6.0 - rank).all(), late
    dist.destroy_process_group()


@check("shared", "2 ranks, several streams", cuda=True)
def in_streams() -> None:
    """Asynchronous calls behind work of the caller's stream, waited for in two others."""
    on_ranks(2, _in_streams)


@check("shared", "2 threads, every operation that moves")
def in_threads() -> None:
    """The backend `threads`."""
    from dure.testing import run_ranks
    from tests.comm.conformance import suite

    def run(rank: int) -> None:
        with torch.device(DEVICE):
            suite.run(rank, "moving")

    run_ranks(2, run)


def _stock_ddp(backend: str) -> None:
    stock.init_process_group(backend, timeout=LIMIT)
    rank, ranks = stock.get_rank(), stock.get_world_size()
    t = torch.full((3,), rank + 1.0, device=DEVICE)
    stock.all_reduce(t)
    assert t.tolist() == [ranks * (ranks + 1) / 2] * 3
    stock.all_gather(gathered := [torch.empty_like(t) for _ in range(ranks)], t + rank)
    assert [one[0].item() - t[0].item() for one in gathered] == list(range(ranks))
    model = nn.parallel.DistributedDataParallel(small_model())
    losses = steps(model, rank, ranks)
    stock.all_reduce(losses)
    torch.testing.assert_close(losses / ranks, steps(small_model()), rtol=1e-4, atol=1e-5)
    stock.destroy_process_group()


@check("shared", '2 ranks, stock PyTorch with "dure"')
def in_stock_pytorch() -> None:
    """The plug-in: collectives, and torch's DDP."""
    on_ranks(2, _stock_ddp, "dure")


# ---- time ----------------------------------------------------------------------------------------

ENGINES = {"dure, shm": (dist, "shm"), "dure, gloo": (dist, "gloo"), "torch, gloo": (stock, "gloo")}


def _reduced(engine: str, nbytes: int) -> float:
    library, backend = ENGINES[engine]
    library.init_process_group(backend)
    t, times = torch.zeros(nbytes // 4, device=DEVICE), list[float]()
    for _ in range(13):
        library.barrier()
        begin = time.perf_counter()
        library.all_reduce(t)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    library.destroy_process_group()
    return statistics.median(times[3:])


def _ddp_time(engine: str) -> tuple[float, float]:
    library, backend = ENGINES[engine]
    library.init_process_group(backend)
    wrap = dist.DistributedDataParallel if library is dist else nn.parallel.DistributedDataParallel
    width, rows = (2048, 2048) if DEVICE.type == "cuda" else (64, 16)
    found = step_time(wrap(layers_of(width, 16)), width, rows)
    library.destroy_process_group()
    return found


def measured(engine: str) -> None:
    """Add the measurements of one library's backend, with two ranks."""

    @check("shared", f"2 ranks, all_reduce of 1 KiB and 64 MiB, {engine}", alone=True)
    def all_reduces() -> str:
        small, large = (max(on_ranks(2, _reduced, engine, size)) for size in (1 << 10, 64 << 20))
        return f"{small * 1e3:.0f} us; {large:.1f} ms"

    @check("shared", f"2 ranks, ddp, 16 layers of 2048, {engine}", alone=True)
    def ddp_steps() -> str:
        taken_ms, peak = max(on_ranks(2, _ddp_time, engine))
        return f"{taken_ms:.1f} ms per step of 2 x 2048 rows, {peak:.0f} MiB for each rank"


for _engine in ENGINES:
    measured(_engine)
