"""Every collective on the backend `nccl` with one rank: dtypes, operations, streams, limits."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch

import dure as dist
from dure.errors import DureError, UsageError
from dure.store import HashStore
from dure.tensor import init_device_mesh
from gpu.checks import (
    ALL,
    BACKEND,
    COMPLEX,
    DEVICE,
    FLOATS,
    FLOATS8,
    INTEGERS,
    WIDE,
    alone,
    check,
    equal,
    for_each,
    numbers,
    one_rank,
    told,
)


def reduction(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Add the check of one operation: the result of one rank is its input, times the factor."""

    def run() -> str:
        op: Any = getattr(dist.ReduceOp, name, None)
        factor = 2 if name == "PREMUL_SUM" else 1
        if factor == 2:
            op = dist.ReduceOp.premul_sum(2.0)

        def one(dtype: torch.dtype) -> bool:
            given = numbers(dtype)
            wanted = (given.double() * 2).to(dtype) if factor == 2 else given.clone()
            results = [given.clone()]
            dist.all_reduce(results[0], op)
            out = torch.empty_like(given)
            dist.reduce_scatter_single(out, given, op)
            dist.reduce(mine := given.clone(), 0, op)
            return all(equal(found, wanted) for found in (*results, out, mine))

        with one_rank():
            return for_each(dtypes, one)

    check("nccl", f"all_reduce, reduce, reduce_scatter {name}")(run)


reduction("SUM", ALL)
reduction("AVG", (*FLOATS, *COMPLEX))
reduction("PRODUCT", (*FLOATS, *INTEGERS))
reduction("MIN", (*FLOATS, *FLOATS8, *INTEGERS, *WIDE))
reduction("MAX", (*FLOATS, *FLOATS8, *INTEGERS, *WIDE))
reduction("BAND", (*INTEGERS, torch.bool))
reduction("BXOR", (*INTEGERS, torch.bool))
reduction("PREMUL_SUM", FLOATS)


@check("nccl")
def collectives_that_move() -> str:
    """Every collective that moves tensors."""

    def one(dtype: torch.dtype) -> bool:
        given, found = numbers(dtype), []
        dist.broadcast(same := given.clone(), 0)
        dist.all_gather(gathered := [torch.empty_like(given)], given)
        dist.all_gather_single(single := torch.empty_like(given), given)
        dist.all_to_all(swapped := [torch.empty_like(given)], [given])
        dist.all_to_all_single(swapped_single := torch.empty_like(given), given)
        dist.all_to_all_single(split := torch.empty_like(given), given, [6], [6])
        dist.gather(given, collected := [torch.empty_like(given)], 0)
        dist.scatter(part := torch.empty_like(given), [given], 0)
        found += [same, *gathered, single, *swapped, swapped_single, split, *collected, part]
        return all(equal(tensor, given) for tensor in found)

    with one_rank():
        return for_each(ALL, one)


@check("nccl")
def shapes_and_strides() -> None:
    """Empty tensors, numbers, a transposed tensor, a large one."""
    with one_rank():
        for shape in ((0,), (), (3, 0), (1 << 24,)):
            t = torch.ones(shape, device=DEVICE)
            dist.all_reduce(t)
            assert equal(t, torch.ones(shape))
        t = torch.arange(6.0, device=DEVICE).view(2, 3).t()
        try:
            dist.all_reduce(t)
        except UsageError:
            return
        assert t.tolist() == [[0, 3], [1, 4], [2, 5]]


@check("nccl")
def object_collectives() -> None:
    """Objects travel as bytes in tensors of the group's device."""
    with one_rank():
        dist.all_gather_object(gathered := [None], {"a": 1})
        dist.gather_object((1, 2), collected := [None], 0)
        dist.scatter_object_list(got := [None], ["x"], 0)
        dist.broadcast_object_list(sent := [{1, 2}], 0)
        dist.broadcast_object_list(named := [3], 0, device=DEVICE)
        assert [*gathered, *collected, *got, *sent, *named] == [{"a": 1}, (1, 2), "x", {1, 2}, 3]


@check("nccl")
def object_collectives_of_cuda_tensors() -> None:
    """A CUDA tensor in an object."""
    with one_rank():
        dist.broadcast_object_list(sent := [torch.ones(2, device=DEVICE)], 0)
        dist.all_gather_object(gathered := [None], torch.ones(2, device=DEVICE))
        assert sent[0].device == DEVICE
        assert gathered[0].tolist() == [1, 1]


@check("nccl")
def coalesced() -> None:
    """`coalescing_manager` and the forms that take lists."""
    with one_rank():
        several = [torch.full((4,), float(i), device=DEVICE) for i in range(5)]
        with dist.coalescing_manager(device=DEVICE):
            for t in several:
                dist.all_reduce(t)
        with dist.coalescing_manager(device=DEVICE, async_ops=True) as pending:
            for t in several:
                dist.all_gather_single(torch.empty_like(t), t)
        pending.wait()
        dist.all_reduce_coalesced(several)
        assert [t[0].item() for t in several] == [0, 1, 2, 3, 4]


@check("nccl")
def functional_collectives() -> None:
    """Differentiable and plain functional forms."""
    from dure.comm import functional

    with one_rank():
        group = dist.group.WORLD
        x = torch.arange(4.0, device=DEVICE)
        assert functional.all_reduce(x, "sum", group).tolist() == [0, 1, 2, 3]
        assert functional.all_gather_tensor(x, 0, group).tolist() == [0, 1, 2, 3]
        assert functional.reduce_scatter_tensor(x, "avg", 0, group).tolist() == [0, 1, 2, 3]


@check("nccl", may_refuse=True)
def messages_to_oneself() -> None:
    """`batch_isend_irecv` from this rank to itself, which NCCL allows inside a group call."""
    with one_rank():
        out = torch.zeros(4, device=DEVICE)
        ops = [dist.P2POp(dist.isend, out + 1, 0), dist.P2POp(dist.irecv, out, 0)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert out.tolist() == [1, 1, 1, 1]


@check("nccl")
def barriers() -> None:
    """`barrier` with and without devices, and `monitored_barrier`."""
    with one_rank():
        dist.barrier()
        dist.barrier(async_op=True).wait()
        if DEVICE.type == "cuda":
            dist.barrier(device_ids=[0])


@check("nccl")
def asynchronous_work() -> None:
    """A `Work` and its future."""
    with one_rank():
        t = torch.ones(1000, device=DEVICE)
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        assert work.is_completed()
        work = dist.all_reduce(t, async_op=True)
        (result,) = [work.get_future().wait()]
        result = result[0] if isinstance(result, list) else result
        assert result.sum().item() == 1000
        work = dist.all_reduce(t, async_op=True)
        work.wait(timeout=datetime.timedelta(seconds=5))


def read_in_two_streams(work: Any, tensor: torch.Tensor) -> list[float]:
    """Wait for an operation in each of two streams; return the mean that each reads after it."""
    seen = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            work.wait()
            seen.append(tensor.clone())
    torch.cuda.synchronize()
    return [t.float().mean().item() for t in seen]


@check("nccl", cuda=True)
def a_wait_orders_every_stream() -> None:
    """Two streams wait for one gather that runs late; both must read the result."""
    with one_rank():
        source, out = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))
        dist.all_gather_single(out, source)
        torch.cuda.synchronize()
        late(source.fill_, 7.0)
        seen = read_in_two_streams(dist.all_gather_single(out, source, async_op=True), out)
        assert seen == [7, 7], seen


@check("nccl", cuda=True)
def a_reduction_in_two_streams() -> None:
    """The same where the result is copied back in the stream of the first wait."""
    with one_rank():
        t = torch.zeros(1 << 20, device=DEVICE, dtype=torch.bfloat16)
        dist.all_reduce(t)
        torch.cuda.synchronize()
        late(t.fill_, 7.0)
        seen = read_in_two_streams(dist.all_reduce(t, async_op=True), t)
        assert seen == [7, 7], seen


@check("nccl", cuda=True)
def is_completed_tells_when_the_kernel_ends() -> None:
    """While the input is late, the work is not completed."""
    with one_rank():
        source, out = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))
        dist.all_gather_single(out, source)
        torch.cuda.synchronize()
        late(source.fill_, 7.0)
        work = dist.all_gather_single(out, source, async_op=True)
        early = work.is_completed()
        torch.cuda.synchronize()
        assert not early
        assert work.is_completed()


@check("nccl", cuda=True)
def the_host_does_not_wait() -> str:
    """A synchronous collective returns before late input is there; torch's does, too."""
    with one_rank():
        t = torch.zeros(1 << 20, device=DEVICE)
        dist.all_reduce(t)
        torch.cuda.synchronize()
        late(t.fill_, 7.0)
        begin = time.perf_counter()
        dist.all_reduce(t)
        returned_s = time.perf_counter() - begin
        torch.cuda.synchronize()
        took_s = time.perf_counter() - begin
        assert t.mean().item() == 7
        assert returned_s < took_s / 2, f"returned after {returned_s:.3f} of {took_s:.3f} s"
        return f"returned after {returned_s * 1e3:.2f} of {took_s * 1e3:.0f} ms"


@check("nccl", cuda=True)
def a_limit_of_wait() -> str:
    """`wait(timeout)` while the input is later than the limit."""
    with one_rank():
        t = torch.zeros(1 << 20, device=DEVICE)
        dist.all_reduce(t)
        torch.cuda.synchronize()
        late(t.fill_, 7.0)
        work = dist.all_reduce(t, async_op=True)
        begin = time.perf_counter()
        try:
            work.wait(timeout=datetime.timedelta(milliseconds=20))
            said = "no error"
        except DureError as error:
            said = told(error)
        return f"{said}, after {(time.perf_counter() - begin) * 1e3:.0f} ms"


@check("nccl", cuda=True)
def inside_a_cuda_graph() -> None:
    """An all_reduce is captured and replayed."""
    with one_rank():
        t = torch.ones(16, device=DEVICE)
        dist.all_reduce(t)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            t.add_(1)
            dist.all_reduce(t)
        graph.replay()
        torch.cuda.synchronize()
        assert t.tolist() == [2.0] * 16


def late(action: Callable[[Any], object], value: float) -> None:
    """Do `action(value)` on the current stream after some 0.3 s."""
    torch.cuda._sleep(500_000_000)
    action(value)


@check("nccl")
def no_backend_named() -> str:
    """`init_process_group()` and a tensor of the device."""
    with alone():
        dist.all_reduce(t := torch.ones(3, device=DEVICE))
        assert t.tolist() == [1, 1, 1]
        return dist.get_backend()


@check("nccl")
def no_backend_but_a_device_named() -> str:
    """The same with `device_id`."""
    with alone(device_id=DEVICE if DEVICE.type == "cuda" else None):
        dist.all_reduce(t := torch.ones(3, device=DEVICE))
        assert t.tolist() == [1, 1, 1]
        return dist.get_backend()


def two_devices(spec: str) -> None:
    """Add the check of a backend for each kind of device."""

    @check("nccl", spec, cuda=True)
    def run() -> str:
        with one_rank(spec):
            for device in (DEVICE, torch.device("cpu")):
                dist.all_reduce(t := torch.ones(3, device=device))
                assert t.tolist() == [1, 1, 1]
                dist.all_gather_single(out := torch.empty(3, device=device), t)
                assert out.device == t.device
            dist.barrier()
            dist.broadcast_object_list(["x"], 0)
            return str(dist.get_backend_config())


two_devices("cpu:shm,cuda:nccl")
two_devices("cpu:hybrid,cuda:nccl")
two_devices("cpu:gloo,cuda:nccl")


@check("nccl")
def ways_to_name_the_device() -> None:
    """`device_id` as a number, a device, or nothing."""
    for device in (0, DEVICE, None):
        with one_rank(device_id=device) if DEVICE.type == "cuda" else one_rank():
            dist.all_reduce(t := torch.ones(2, device=DEVICE))
            dist.barrier()
            assert t.tolist() == [1, 1]


@check("nccl")
def groups() -> None:
    """Subgroups, split groups, a mesh; and the world once more after it was left."""
    for _ in range(2):
        with one_rank():
            mesh = init_device_mesh(DEVICE.type, (1, 1), mesh_dim_names=("a", "b"))
            made = [dist.new_group([0]), dist.split_group(split_ranks=[[0]]), mesh.get_group("a")]
            for group in made:
                dist.all_reduce(t := torch.ones(2, device=DEVICE), group=group)
                assert t.tolist() == [1, 1]
            dist.destroy_process_group(made[0])


@check("nccl")
def timeouts() -> None:
    """`set_timeout` of a group; a rank that does not come is a typed error."""
    limit = datetime.timedelta(seconds=2)
    with one_rank(timeout=limit):
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=9))
        dist.all_reduce(torch.ones(2, device=DEVICE))
    try:
        dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=2, timeout=limit)
    except dist.RendezvousTimeout:
        return
    raise AssertionError("no RendezvousTimeout")


@check("nccl", cuda=True)
def shrinking_and_aborting() -> None:
    """`shrink` without a lost rank, and a group that is left with work pending."""
    with one_rank():
        group = dist.shrink()
        dist.all_reduce(t := torch.ones(2, device=DEVICE), group=group)
        assert t.tolist() == [1, 1]
        late(t.fill_, 1.0)
        dist.all_reduce(t, async_op=True)
