"""Cases off the main road: Dure beside torch.distributed over Gloo, and beside a neighboring case.

    dure run --nproc 2 benchmarks/cliffs.py
    dure run --nproc 8 benchmarks/cliffs.py --only sizes,objects

Both frameworks run in the same processes and take turns, round by round. The table has two times
per call, each the least of all rounds: of the slowest rank by the clock, and (*cpu*) the processor
time of all ranks together, which can be read on a busy machine, too. Ratios, by the clock and by
processor time, are Dure over Gloo, and Dure over Dure's own neighboring case. A pair above 1.5 is
marked. Those that are known to be above are in docs/performance.md, with the reason.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
import torch.distributed.checkpoint as their_checkpoint
import torch.distributed.rpc as their_rpc
import torch.distributed.tensor as their_tensor
from torch.distributed.device_mesh import init_device_mesh as their_mesh
from torch.nn.utils import get_total_norm
from torch.utils.data import DistributedSampler as TheirSampler

import dure as dist
import dure.checkpoint as our_checkpoint
import dure.rpc as our_rpc
import dure.tensor as our_tensor

LIMIT = 1.5
THRESHOLDS = [32, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20]
"""Sizes in bytes at which the engine changes its way."""

Call = Callable[[], object]


@dataclass(slots=True)
class Case:
    """Something to measure.

    Attributes:
        name: What is done.
        ours: One call by Dure.
        theirs: The same by torch over Gloo; None if it cannot do that.
        neighbor: The neighboring case, by Dure.
        near: What the neighboring case is.
        calls: Calls of a sample.
        rounds: Samples; None for the number of the command line.
    """

    name: str
    ours: Call
    theirs: Call | None = None
    neighbor: Call | None = None
    near: str = ""
    calls: int = 10
    rounds: int | None = None


@dataclass(slots=True)
class Job:
    """This rank's place in the job, and the options of the command line."""

    rank: int
    size: int
    late_s: float
    folder: Path

    def late(self, arrive: Call, wait: Call | None = None) -> Call:
        """Return a call for which the last rank is late: it sleeps and runs `arrive`.

        The other ranks run `wait`, or `arrive` if that is None.
        """

        def call() -> None:
            if self.rank == self.size - 1:
                time.sleep(self.late_s)
                arrive()
            else:
                (wait or arrive)()

        return call


# ---- measuring -----------------------------------------------------------------------------------


def sample(call: Call, calls: int) -> tuple[float, float]:
    """Return the wall time of the slowest rank and the processor time of all ranks, per call."""
    td.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    slowest, together = torch.tensor([wall / calls]).double(), torch.tensor([cpu / calls]).double()
    td.all_reduce(slowest, td.ReduceOp.MAX)
    td.all_reduce(together, td.ReduceOp.SUM)
    return slowest.item(), together.item()


def show(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def measure(case: Case, job: Job, rounds: int) -> None:
    """Measure and print one case."""
    contestants = {"ours": case.ours, "theirs": case.theirs, "neighbor": case.neighbor}
    present = {name: call for name, call in contestants.items() if call is not None}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in present}
    if case.rounds is None:
        for call in present.values():  # the first call of a kind makes what later ones use
            call()
    for _ in range(case.rounds or rounds):
        for name, call in present.items():
            times[name].append(sample(call, case.calls))
    wall = {name: min(t[0] for t in ts) for name, ts in times.items()}
    cpu = {name: min(t[1] for t in ts) for name, ts in times.items()}
    line = f"{case.name:58s} {show(wall['ours']):>10s} {show(cpu['ours']):>10s}"
    for name, near in (("theirs", ""), ("neighbor", case.near)):
        if name not in present:
            line += f" {'-':>10s} {'-':>10s} {'':>12s}"
            continue
        ratios = [wall["ours"] / wall[name], cpu["ours"] / max(cpu[name], 1e-9)]
        mark = "*" if min(ratios) > LIMIT else " "
        line += f" {show(wall[name]):>10s} {show(cpu[name]):>10s}"
        line += f" {ratios[0]:5.2f} {ratios[1]:5.2f}{mark} {near}"
    if job.rank == 0:
        print(line.rstrip(), flush=True)


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# ---- collectives ---------------------------------------------------------------------------------


def ones(count: int, offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return `count` ones that begin `offset` elements after the start of a storage."""
    return torch.ones(count + offset, dtype=dtype)[offset:]


def operation(lib: Any, op: str, num_bytes: int, job: Job, plus: int = 0, offset: int = 0) -> Call:
    """Return a call of an operation.

    Args:
        lib: The framework.
        op: The operation.
        num_bytes: What each rank contributes, or sends to each.
        job: This rank.
        plus: Further elements.
        offset: Elements before each tensor in its storage.
    """
    dtype = dtype_of(op)
    count = num_bytes // dtype.itemsize + plus
    data, other = ones(count, offset, dtype), ones(count, offset, dtype)
    parts = [ones(count, offset, dtype) for _ in range(job.size)]
    whole, result = (ones(count * job.size, offset, dtype) for _ in range(2))
    peer = job.rank ^ 1

    def exchange() -> None:
        if peer >= job.size:
            return
        if job.rank < peer:
            lib.send(data, peer)
        lib.recv(other, peer)
        if job.rank > peer:
            lib.send(data, peer)

    return {
        "all_reduce": lambda: lib.all_reduce(data),
        "broadcast": lambda: lib.broadcast(data, 0),
        "all_gather": lambda: lib.all_gather(parts, data),
        "reduce_scatter": lambda: lib.reduce_scatter(data, parts),
        "all_to_all": lambda: lib.all_to_all_single(result, whole),
        "exchange": exchange,
    }[op]


def dtype_of(op: str) -> torch.dtype:
    """Return bytes where nothing is computed, so that any length and offset can be had."""
    return torch.float32 if "reduce" in op else torch.uint8


OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def often(num_bytes: int) -> int:
    """Return how many calls of this size make a sample."""
    return max(2, min(50, (8 << 20) // num_bytes))


def sizes(job: Job) -> Iterator[Case]:
    """Sizes just above a threshold of the engine."""
    for op in OPERATIONS:
        for num_bytes in THRESHOLDS:
            yield Case(
                f"{op} of {num_bytes} + {dtype_of(op).itemsize} bytes",
                operation(dist, op, num_bytes, job, plus=1),
                operation(td, op, num_bytes, job, plus=1),
                operation(dist, op, num_bytes, job),
                f"{num_bytes} bytes",
                often(num_bytes),
            )


def alignments(job: Job) -> Iterator[Case]:
    """Tensors that begin at odd offsets of a storage."""
    for op in OPERATIONS:
        for num_bytes in (4 << 10, 256 << 10, 4 << 20):
            offset = 1 if dtype_of(op) == torch.float32 else 3
            yield Case(
                f"{op} of {num_bytes} bytes, at {offset * dtype_of(op).itemsize}",
                operation(dist, op, num_bytes, job, offset=offset),
                operation(td, op, num_bytes, job, offset=offset),
                operation(dist, op, num_bytes, job),
                "at 0",
                often(num_bytes),
            )


def uneven(job: Job) -> Iterator[Case]:
    """Splits of which one has nearly all elements, against even ones."""
    total = 1 << 18
    small = 16
    lengths = [total - small * (job.size - 1)] + [small] * (job.size - 1)
    even = [total // job.size] * job.size

    def all_to_all(lib: Any, ns: list[int]) -> Call:
        mine = [ns[job.rank]] * job.size
        data, out = torch.ones(sum(mine)), torch.empty(sum(ns))
        return lambda: lib.all_to_all_single(out, data, ns, mine)

    def all_gather(ns: list[int]) -> Call:
        outs, data = [torch.empty(n) for n in ns], torch.ones(ns[job.rank])
        return lambda: dist.all_gather(outs, data)

    def reduce_scatter(ns: list[int]) -> Call:
        parts, out = [torch.ones(n) for n in ns], torch.empty(ns[job.rank])
        return lambda: dist.reduce_scatter(out, parts)

    yield Case(
        "all_to_all_single, uneven", all_to_all(dist, lengths), all_to_all(td, lengths),
        all_to_all(dist, even), "even",
    )  # fmt: skip
    yield Case("all_gather, uneven", all_gather(lengths), None, all_gather(even), "even")
    reduced = reduce_scatter(even)
    yield Case("reduce_scatter, uneven", reduce_scatter(lengths), None, reduced, "even")


def in_flight(job: Job) -> Iterator[Case]:
    """1,000 operations in flight, against one after the other."""
    tensors = [torch.ones(10) for _ in range(1000)]

    def started(lib: Any) -> None:
        for work in [lib.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    def blocking() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def messages(lib: Any) -> None:
        peer = (job.rank + 1) % job.size
        source = (job.rank - 1) % job.size
        works = [lib.isend(t, peer) for t in tensors]
        works += [lib.irecv(torch.empty(10), source) for _ in tensors]
        for work in works:
            work.wait()

    yield Case(
        "1,000 all_reduce in flight", lambda: started(dist), lambda: started(td), blocking,
        "blocking", calls=1,
    )  # fmt: skip
    yield Case(
        "1,000 isend and irecv in flight", lambda: messages(dist), lambda: messages(td), calls=1
    )


def groups(job: Job) -> Iterator[Case]:
    """100 groups: made and destroyed, and used in turn."""
    everyone = list(range(job.size))

    def cycle(lib: Any) -> None:
        made = [lib.new_group(everyone) for _ in range(100)]
        for group in made:
            lib.destroy_process_group(group)

    def use(lib: Any, many: list[Any], count: int) -> Call:
        data = torch.ones(count)

        def call() -> None:
            for group in many:
                lib.all_reduce(data, group=group)

        return call

    yield Case(
        "100 groups made and destroyed", lambda: cycle(dist), lambda: cycle(td), calls=1, rounds=3
    )
    ours: list[Any] = [dist.new_group(everyone) for _ in range(100)]
    theirs: list[Any] = [td.new_group(everyone) for _ in range(100)]
    for count in (2, 1 << 18):
        yield Case(
            f"all_reduce of {4 * count} bytes by 100 groups in turn",
            use(dist, ours, count), use(td, theirs, count), use(dist, ours[:1] * 100, count),
            "by one group", calls=1,
        )  # fmt: skip
    for our, their in zip(ours, theirs, strict=True):
        dist.destroy_process_group(our)
        td.destroy_process_group(their)


def objects(job: Job) -> Iterator[Case]:
    """Collectives of objects, against a round of pickle and a collective of as many bytes."""
    yield from of_object("small objects", {"rank": job.rank}, job)
    yield from of_object("1,000 small tensors", [torch.ones(3) for _ in range(1000)], job)
    yield from of_object("objects of 10 MB", bytearray(10_000_000), job)


def of_object(name: str, obj: object, job: Job) -> Iterator[Case]:
    packed = pickle.dumps(obj)
    data = torch.ones(len(packed), dtype=torch.uint8)
    outs = [torch.empty_like(data) for _ in range(job.size)]

    def gather(lib: Any) -> Call:
        return lambda: lib.all_gather_object([None] * job.size, obj)

    def broadcast(lib: Any) -> Call:
        return lambda: lib.broadcast_object_list([obj], src=0)

    def gather_bytes() -> None:
        pickle.dumps(obj)
        dist.all_gather(outs, data)
        for _ in range(job.size):
            pickle.loads(packed)

    def broadcast_bytes() -> None:
        if job.rank == 0:
            pickle.dumps(obj)
        dist.broadcast(data, 0)
        if job.rank > 0:
            pickle.loads(packed)

    near = "pickle and bytes"
    yield Case(f"all_gather_object of {name}", gather(dist), gather(td), gather_bytes, near)
    sent = broadcast(dist), broadcast(td), broadcast_bytes
    yield Case(f"broadcast_object_list of {name}", *sent, near)


# ---- waiting, memory -----------------------------------------------------------------------------


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def waiting(job: Job) -> Iterator[Case]:
    """Processor time of ranks that wait for a late one: of a collective, a message, the store."""
    data, last = torch.ones(10), job.size - 1

    def message(lib: Any) -> Call:
        def arrive() -> None:
            for rank in range(last):
                lib.send(data, rank)

        return job.late(arrive, lambda: lib.recv(data, last))

    def key(store: Any) -> Call:
        numbers = iter(range(1 << 30))
        return job.late(
            lambda: store.set(f"late{next(numbers)}", "1"),
            lambda: store.wait([f"late{next(numbers)}"]),
        )

    slow = f"a rank that is {job.late_s:g} s late"
    for name, of in (
        ("all_reduce", lambda lib: job.late(lambda: lib.all_reduce(data))),
        ("barrier", lambda lib: job.late(lib.barrier)),
        ("recv", message),
    ):
        yield Case(f"{name}, {slow}", of(dist), of(td), calls=1, rounds=1)
    for name, store_of in (("FileStore", file_store), ("TCPStore", tcp_store)):
        ours, theirs = key(store_of(dist, job)), key(store_of(td, job))
        yield Case(f"{name}.wait, {slow}", ours, theirs, calls=1, rounds=1)


def file_store(lib: Any, job: Job) -> Any:
    return lib.FileStore(str(job.folder / f"{lib.__name__}.store"), job.size)


def tcp_store(lib: Any, job: Job) -> Any:
    """Return a store of all ranks, whose server is rank 0's."""
    here = ("127.0.0.1", 0, job.size, True)
    server = lib.TCPStore(*here, wait_for_workers=False) if job.rank == 0 else None
    port = [server and server.port]
    dist.broadcast_object_list(port, src=0)
    return server or lib.TCPStore(here[0], port[0], job.size, False, wait_for_workers=False)


def remote_calls(job: Job) -> Iterator[Case]:
    """Remote calls that take long, without and beside TensorPipe, whose threads poll."""

    def call(lib: Any, name: str) -> Call:
        def run() -> None:
            if job.rank == 0:
                lib.rpc_sync(f"{name}{job.size - 1}", asleep, (job.late_s,))
            else:
                time.sleep(job.late_s)

        return run

    our_rpc.init_rpc(f"ours{job.rank}", rank=job.rank, world_size=job.size)
    name, ours, theirs = f"rpc_sync of {job.late_s:g} s", call(our_rpc, "ours"), "theirs"
    yield Case(name, ours, calls=1, rounds=1)
    options = their_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job.folder}/rpc")
    their_rpc.init_rpc(
        f"{theirs}{job.rank}", rank=job.rank, world_size=job.size, rpc_backend_options=options
    )
    yield Case(f"{name}, beside TensorPipe", ours, call(their_rpc, theirs), calls=1, rounds=1)
    their_rpc.shutdown()
    our_rpc.shutdown()


def memory(job: Job) -> Iterator[Case]:
    """Resident memory after 1,000 different sizes; printed, and compared by nothing."""
    for name, lib in (("Dure", dist), ("torch over Gloo", td)):
        before = resident_mb()
        for k in range(1, 1001):
            lib.all_reduce(torch.ones(k * 997))
        if job.rank == 0:
            grown = resident_mb() - before
            print(f"resident memory after 1,000 sizes up to 4 MB: {grown:+.1f} MB by {name}")
    yield from ()


# ---- samplers, checkpoints, sharded tensors ------------------------------------------------------


def samplers(job: Job) -> Iterator[Case]:
    """Samplers of 10 million items: the start of an epoch, and a million indices."""
    ours: Any
    theirs: Any
    for is_shuffled in (True, False):
        items: Any = range(10_000_000)
        ours = dist.DistributedSampler(items, job.size, job.rank, is_shuffled)
        theirs = TheirSampler(items, job.size, job.rank, is_shuffled)
        for name, count in (("the first index", 1), ("1,000,000 indices", 1_000_000)):
            yield Case(
                f"{name} of 10 million, {'shuffled' if is_shuffled else 'in order'}",
                taking(ours, count), taking(theirs, count), calls=1, rounds=3,
            )  # fmt: skip


def taking(sampler: Any, count: int) -> Call:
    """Return a call that takes the first indices of an epoch."""

    def call() -> None:
        for _ in islice(sampler, count):
            pass

    return call


def checkpoints(job: Job) -> Iterator[Case]:
    """A checkpoint of 20,000 tensors."""
    state = {f"layer{k // 4}.weight{k % 4}": torch.full((10,), float(k)) for k in range(20_000)}

    def call(lib: Any, name: str, folder: str) -> Call:
        return lambda: getattr(lib, name)(state, checkpoint_id=job.folder / folder)

    for name in ("save", "load"):
        yield Case(
            f"{name} of 20,000 tensors",
            call(our_checkpoint, name, "ours"), call(their_checkpoint, name, "theirs"),
            calls=1, rounds=3,
        )  # fmt: skip


def norms(job: Job) -> Iterator[Case]:
    """Norms of 1,000 sharded tensors, and full tensors whose rows the ranks do not divide."""

    def sharded(lib: Any, rows: int, count: int) -> list[Any]:
        make_mesh = dist.init_device_mesh if lib is our_tensor else their_mesh
        full, mesh, place = torch.ones(rows, 32), make_mesh("cpu", (job.size,)), [lib.Shard(0)]
        return [lib.distribute_tensor(full, mesh, place) for _ in range(count)]

    mine, other = sharded(our_tensor, 64, 1000), sharded(their_tensor, 64, 1000)
    total: Any = get_total_norm
    of_list: Any = torch._foreach_norm  # pyright: ignore
    for name, call in (
        ("torch._foreach_norm of 1,000", of_list),
        ("get_total_norm of 1,000, read", lambda x: total(x).full_tensor()),
        ("vector_norm of each of 1,000", lambda x: [torch.linalg.vector_norm(t) for t in x]),
        (
            "vector_norm of each, read",
            lambda x: [torch.linalg.vector_norm(t).full_tensor() for t in x],
        ),
    ):
        yield Case(name, lambda c=call: c(mine), lambda c=call: c(other), calls=1)
    (odd,), (even,) = sharded(our_tensor, 1001, 1), sharded(our_tensor, 1000, 1)
    (theirs,) = sharded(their_tensor, 1001, 1)
    yield Case(
        "full_tensor of 1,001 rows", odd.full_tensor, theirs.full_tensor, even.full_tensor,
        "1,000 rows",
    )  # fmt: skip


CASES: dict[str, Callable[[Job], Iterator[Case]]] = {
    part.__name__: part
    for part in (
        sizes, alignments, uneven, in_flight, groups, objects, waiting, memory, samplers,
        checkpoints, norms, remote_calls,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(CASES), help=f"of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case")
    parser.add_argument("--late", type=float, default=10.0, help="seconds by which a rank is late")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="cliffs_")]
    dist.broadcast_object_list(folder, src=0)
    path = Path(folder[0])
    td.init_process_group("gloo", init_method=f"file://{path}/gloo", rank=rank, world_size=size)
    job = Job(rank, size, options.late, path)
    if rank == 0:
        print(f"{'':58s} {'Dure':>10s} {'cpu':>10s} {'Gloo':>10s} {'cpu':>10s} {'ratios':>11s}")
    for name in options.only.split(","):
        for case in CASES[name](job):
            measure(case, job, options.rounds)
    td.destroy_process_group()
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
