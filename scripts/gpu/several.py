"""2 and more ranks, each with a GPU of its own: NCCL between GPUs, for users who have them.

Every rank sees only its own GPU, as cuda:0. On the CPU the default backend takes NCCL's place.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as stock

import dure as dist
from gpu.checks import DEVICE, Refused, check
from gpu.shared import KINDS, LIMIT, trained

ON_GPU = DEVICE.type == "cuda"
SUBJECTS = ("moving", "reducing", "layouts", "overlapping")
"""Not "messages", which sends first on all ranks: over NCCL a deadlock."""
NOT_OVER_NCCL = (
    "case_order_of_reduction_is_that_of_ranks",
    "case_inference_tensors_outside_inference_mode",
)


def on_gpus(work: Callable[..., Any], *args: Any, most: int = 8) -> list[Any]:
    """Return what a function returns on each rank, one per GPU; raise the error of one that fails.

    Raises:
        Refused: There is only one GPU.
    """
    count = min(torch.cuda.device_count(), most) if ON_GPU else 2
    if count < 2:
        raise Refused("this machine has one GPU")
    try:
        return dist.spawn(work, count, args, virtual_local_rank=True)
    except dist.LaunchError as error:
        raise error.__cause__ or error from None


def several(name: str, work: Callable[..., Any], *args: Any, alone: bool = False) -> None:
    """Add the check of a function that each rank runs, and whose first result is printed."""
    run = lambda: on_gpus(work, *args)[0]  # noqa: E731
    check("several", name, may_refuse=True, alone=alone)(run)


def _chosen() -> str:
    dist.init_process_group(timeout=LIMIT)
    config = str(dist.get_backend_config())
    assert not ON_GPU or "nccl" in config, config
    t = torch.full((3,), dist.get_rank() + 1.0, device=DEVICE)
    dist.all_reduce(t)
    size = dist.get_world_size()
    assert t.tolist() == [size * (size + 1) / 2] * 3, t
    dist.destroy_process_group()
    return f"{size} ranks, {config}"


def _conformance(subject: str) -> str:
    from tests.comm.conformance import suite

    dist.init_process_group(timeout=LIMIT)
    with torch.device(DEVICE):
        ran = suite.run(dist.get_rank(), subject, skip=NOT_OVER_NCCL)
    dist.destroy_process_group()
    return f"{len(ran)} cases"


def _batches() -> None:
    dist.init_process_group(timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(1 << 20, device=DEVICE)
    for _ in range(5):
        send = torch.full((1 << 20,), rank + 1.0, device=DEVICE)
        batch = [
            dist.P2POp(dist.isend, send, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert received.eq((rank - 1) % size + 1.0).all()
    with dist.coalescing_manager():
        for t in (first := torch.ones(4, device=DEVICE)), (second := torch.ones(5, device=DEVICE)):
            dist.all_reduce(t)
    assert first.tolist() + second.tolist() == [float(size)] * 9
    dist.destroy_process_group()


def _death() -> str:
    """Rank 1 ends; the others get a PeerLost while they wait for the device."""
    dist.init_process_group(timeout=LIMIT)
    t = torch.ones(4, device=DEVICE)
    dist.all_reduce(t)
    assert t.tolist()[0] == dist.get_world_size()
    dist.all_gather_object([None] * dist.get_world_size(), 0)
    if dist.get_rank() == 1:
        os._exit(0)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 10:
            dist.all_reduce(t)
            t.tolist()
    except dist.PeerLost as error:
        if error.peer != 1:
            raise
        return f"{time.monotonic() - began:.1f} s"
    raise AssertionError("no PeerLost in 10 s")


def _late() -> str:
    """Rank 1 does not call; the others get a CommTimeout that names it."""
    dist.init_process_group(timeout=LIMIT)
    group = dist.new_group(timeout=timedelta(seconds=2))
    t = torch.ones(4, device=DEVICE)
    dist.all_reduce(t, group=group)
    t.tolist()
    if dist.get_rank() == 1:
        time.sleep(8)
        os._exit(0)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 7:
            dist.all_reduce(t, group=group)
            t.tolist()
    except dist.CommTimeout as error:
        if 1 not in error.missing:
            raise
        group.abort()
        return f"{time.monotonic() - began:.1f} s"
    raise AssertionError("no CommTimeout in 7 s")


def _late_at_first() -> str:
    """Rank 1 does not call the first operation of a group, which makes its communicator."""
    dist.init_process_group(timeout=LIMIT)
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(8)
        os._exit(0)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
    except dist.CommTimeout as error:
        if 1 not in error.missing:
            raise
        group.abort()
        return f"{time.monotonic() - began:.1f} s"
    raise AssertionError("no CommTimeout")


def _split() -> str:
    """Groups of ranks that are bound to devices are split off the default group."""
    dist.init_process_group(timeout=LIMIT, device_id=torch.device("cuda", 0) if ON_GPU else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    began = time.monotonic()
    last = dist.split_group(split_ranks=[[0, size - 1], [*range(1, size - 1)]][: 1 + (size > 2)])
    took_s = time.monotonic() - began
    t = torch.full((3,), rank + 1.0, device=DEVICE)
    if rank < 2:
        dist.all_reduce(t, group=pair)
        assert t.tolist() == [3.0] * 3, t
    if rank in (0, size - 1):
        t.fill_(rank + 1.0)
        dist.all_reduce(t, group=last)
        assert t.tolist() == [size + 1.0] * 3, t
    world: Any = dist.group.WORLD
    splits = [b._engine._engine.comm_split_count() for b in world.backends_with("splits")]
    assert splits == ([2] if ON_GPU else []), splits
    dist.destroy_process_group()
    return f"split_group took {took_s * 1000:.0f} ms"


def _times(library: Any) -> str:
    """The median time of all_reduces, and the bytes that each rank moves per second."""
    backend = {"backend": "nccl"} if library is stock and ON_GPU else {}
    library.init_process_group(**(backend or ({"backend": "gloo"} if library is stock else {})))
    size, found = library.get_world_size(), list[str]()
    for nbytes in (1 << 10, 1 << 20, 64 << 20):
        t, times = torch.zeros(nbytes // 4, device=DEVICE), list[float]()
        for _ in range(13):
            library.barrier()
            begin = time.perf_counter()
            library.all_reduce(t)
            if ON_GPU:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        taken = statistics.median(times[3:])
        rate = 2 * (size - 1) / size * nbytes / taken / 1e9
        found.append(f"{nbytes >> 10} KiB: {taken * 1e6:.0f} us, {rate:.1f} GB/s")
    library.destroy_process_group()
    return "; ".join(found)


def _training(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_gpus(trained, kind, folder, most=4)


several("no backend named", _chosen)
for _subject in SUBJECTS:
    several(f"every operation: {_subject}", _conformance, _subject)
several("batches of messages in a ring, and of collectives", _batches)
several("a rank dies", _death)
several("a rank is late", _late)
several("a rank is late at the first operation", _late_at_first)
several("groups that are split off", _split)
for _kind in (*(k for k in KINDS if not k.endswith("shared")), "pipeline", "checkpoint"):
    check("several", _kind, may_refuse=True)(lambda kind=_kind: _training(kind))
several("all_reduce, dure", _times, dist, alone=True)
several("all_reduce, torch", _times, stock, alone=True)
