"""Hits by the extension and by Python, ranks outside of a mesh, and what may be written."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import NotInGroupError, PlacementError, ShapeError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    dispatch,
    distribute_tensor,
    experimental,
    extension,
    init_device_mesh,
    wrapping,
)
from dure.tensor.extension import use_native
from dure.testing import CommRecorder, run_ranks
from tests.tensor.ranks import programs
from tests.tensor.ranks.parts import made
from tests.tensor.ranks.programs import Step
from tests.thread_ranks import on_mesh, on_ranks


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and wrapping.native is None:
        pytest.skip("needs the compiled dispatch: it was not built")
    extension.use_native(request.param == "native")
    yield request.param
    extension.use_native(True)


@on_ranks(3)
def test_ranks_outside_the_mesh_run_operators_and_send_nothing(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    local = torch.ones(2, 4, requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert x.shape == (4, 4)
    if rank < 2:
        assert (x @ x).sum().item() == 64
        return
    assert x.to_local().shape == (0,)
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    with CommRecorder() as seen:
        results = {
            (4, 4): (x + 1, x @ weight, x.softmax(0), torch.cat([x, x])[:4], x.sort(0)[0]),
            (2, 4): (
                x.split(2)[1],
                torch.linalg.inv(x)[:2],
                x.view(2, 8)[:, 4:],
                x.as_strided((2, 4), (4, 1)),
            ),
            (): (x.sum(), x.std(), torch.stack([x.mean(), x.amax()])[0]),
            (4,): (x.max(1)[1], x.unbind(1)[0], torch.nn.functional.mse_loss(x, x).expand(4)),
        }
        (x @ weight).sum().backward()
        for fused in (False, True):
            torch.optim.AdamW([weight], fused=fused).step()
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(x, x)
        assert torch.allclose(x, x)
        assert x.full_tensor().shape == (0,)
    for shape, found in results.items():
        for one in found:
            assert one.shape == shape
            assert one.to_local().shape == ((0,) if shape else ())
            assert one.to_local().dtype == one.dtype
    assert seen.ops == []
    with pytest.raises(NotInGroupError):
        x.sum().item()


def test_an_operator_runs_on_the_parts_without_python(way):
    """What is counted here is whether the way that the fixture names is the one that ran."""
    calls = []

    def body(rank: int) -> None:
        x = made(init_device_mesh("cpu", (1,)), torch.ones(2), [Shard(0)])
        _ = x + x
        code = dispatch.dispatch.__code__

        def seen(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code is code:
                calls.append(event)

        sys.setprofile(seen)
        _ = x + x
        sys.setprofile(None)

    run_ranks(1, body)
    assert len(calls) == (0 if way == "native" else 1)


A = [[0.0, 1.0], [2.0, 3.0]]
# Each: a call on x = A with the given placement, and the full results, or the error.
HITS: dict[str, tuple[Any, Any, Any]] = {
    "one result": (Shard(0), lambda x: x + x, [[0, 2], [4, 6]]),
    "a number": (Shard(0), lambda x: x * 3, [[0, 3], [6, 9]]),
    "a float": (Partial(), lambda x: x / 2.0, [[0, 0.5], [1, 1.5]]),
    "a keyword": (Shard(0), lambda x: torch.add(x, x, alpha=2), [[0, 3], [6, 9]]),
    "a list": (Shard(1), lambda x: x.permute([1, 0]), [[0, 2], [1, 3]]),
    "a list of tensors": (Shard(0), lambda x: torch.cat([x, x], 1), [[0, 1, 0, 1], [2, 3, 2, 3]]),
    "two results": (Shard(0), lambda x: x.sort(1, True), ([[1, 0], [3, 2]], [[1, 0], [1, 0]])),
    "in place": (Shard(0), lambda x: x.add_(1), [[1, 2], [3, 4]]),
    "in place, moved": (Partial(), lambda x: x.square_(), [[0, 1], [4, 9]]),
    "moved": (Shard(0), lambda x: x @ x, [[2, 3], [6, 11]]),
    "in inference": (Shard(0), torch.inference_mode()(lambda x: x - 1), [[-1, 0], [1, 2]]),
    "no hash": (Shard(0), lambda x: x.new_full((2,), 5.0, dtype=None), [5, 5]),
    "a plain tensor": (Shard(0), lambda x: x + torch.ones(2, 2), UsageError),
    "another type": (Shard(0), lambda x: x.add("two"), TypeError),
    "a gradient": (Shard(0), lambda x: _gradient(x, lambda t: (t * t).sum()), [[0, 2], [4, 6]]),
    "a Partial gradient": (Replicate(), lambda x: _gradient(x, _of_row), [[1, 2], [1, 2]]),
}


def _gradient(x: Any, loss: Any) -> Any:
    x = x.detach().requires_grad_()
    loss(x).backward()
    assert not x.grad.placements[0].is_partial()
    return x.grad


def _of_row(x: Any) -> Any:
    return (x @ made(x.device_mesh, torch.tensor([1.0, 2.0]), [Shard(0)])).sum()


@pytest.mark.parametrize("name", HITS)
def test_the_extension_does_what_python_does(way, name):
    placement, call, expected = HITS[name]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(3):  # without a plan, and with it
            x = made(mesh, torch.tensor(A), [placement])
            if isinstance(expected, type):
                with pytest.raises(expected):
                    call(x)
                continue
            found = call(x)
            several = isinstance(found, (list, tuple))
            for one, full in zip(
                found if several else [found], expected if several else [expected], strict=True
            ):
                assert type(one) is DTensor
                assert one.full_tensor().tolist() == full
                assert one.shape == torch.tensor(full).shape
                assert one.to_local().shape == one.spec.local_shape

    run_ranks(2, body)


def test_operands_are_released_with_the_call(way):
    """What an operator was given is no one's afterwards: no cycle keeps it until a collection."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        calls = (lambda x: x.sort(0), lambda x: torch.cat([x, x]).split(2), lambda x: x.relu_())
        for call in calls:
            for _ in range(2):  # without a plan, and with it
                x = made(mesh, torch.ones(2, 3), [Shard(0)])
                held = weakref.ref(x.part)
                call(x)
                del x
                assert held() is None

    gc.collect()
    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


# ---- keys ----------------------------------------------------------------------------------------


@on_mesh(2)
def test_floats_that_a_rule_looks_at_are_told_apart(mesh, way):
    # Filling with 0 leaves terms of a sum; filling with 5 does not.
    x = made(mesh, torch.ones(2), [Partial()])
    mask = made(mesh, torch.tensor([True, False]), [Replicate()])
    for _ in range(2):
        assert x.masked_fill(mask, 0.0).full_tensor().tolist() == [0, 1]
        assert x.masked_fill(mask, 5.0).full_tensor().tolist() == [5, 1]


# Each: a write of [[0, 1, 2, 3], [4, 5, 6, 7]], each row on a rank and stored as a column, by what
# shares its memory; and the first row afterwards.
OVERLAPS: dict[str, tuple[Any, list[float]]] = {
    "other strides": (lambda x: x.add_(x.view_as(x)), [0, 2, 4, 6]),
    "gaps": (lambda x: x[:, :-1].copy_(x[:, 1:]), [1, 2, 3, 3]),
    "out": (lambda x: torch.mul(x[:, 1:], 2, out=x[:, :-1]), [2, 4, 6, 3]),
    "a list": (lambda x: torch._foreach_add_([x[:, :-1]], [x[:, 1:]]), [1, 3, 5, 3]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_shares_memory_may_be_written_where_torch_refuses_only_parts(way, name):
    write, row = OVERLAPS[name]

    def body(rank: int) -> list[list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(2):
            x = made(mesh, torch.arange(8.0).reshape(2, 4), [Shard(0)], "columns")
            write(x)
        return x.full_tensor().tolist()

    for rows in run_ranks(2, body):
        assert rows[0] == row


# Each: an operator that writes `out`, of a tensor of [4, 6]; by a rule, by several results, by
# others that it is decomposed into, or by none of these.
WRITES: dict[str, Any] = {
    "a rule": lambda x, out: torch.add(x, x, out=out),
    "two results": lambda x, out: torch.max(x, 0, out=(out, out.long())),
    "a decomposition": lambda x, out: torch.kron(x, x, out=out),
    "no rule": lambda x, out: torch.cummax(x, 0, out=(out, out.long())),
}


@pytest.mark.filterwarnings("ignore:.* has no sharding rule", "ignore:An output with one or more")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 7)])
@on_mesh(2)
def test_out_of_another_shape_is_refused_and_stays_as_it_is(mesh, name, shape):
    for placement in (Replicate(), Shard(0)):
        x = distribute_tensor(torch.ones(4, 6), mesh, [placement])
        out = distribute_tensor(torch.full(shape, 7.0), mesh, [Replicate()])
        for _ in range(2):  # no plan is kept of a call that is refused
            with pytest.raises((ShapeError, PlacementError)):
                WRITES[name](x, out)
        assert out.shape == out.to_local().shape == shape
        assert (out.to_local() == 7).all()


@pytest.mark.filterwarnings("ignore:.* has no sharding rule")
@on_mesh(2)
def test_out_of_the_same_shape_is_written(mesh):
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    out = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    assert torch.add(x, x, out=out) is out
    assert out.full_tensor().tolist() == [0, 2, 4, 6]
    values, numbers = (DTensor.from_local(torch.zeros(4).to(t), mesh) for t in (x.dtype, int))  # pyright: ignore
    torch.cummax(x, 0, out=(values, numbers))
    assert values.to_local().tolist() == numbers.to_local().tolist() == [0, 1, 2, 3]
    halves = [DTensor.from_local(torch.zeros(2), mesh) for _ in range(2)]
    torch.split_copy(x, 2, out=halves)  # pyright: ignore
    assert halves[1].to_local().tolist() == [2, 3]


@on_ranks(3)
def test_ranks_outside_the_mesh_write_nothing(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    row = torch.ones(1, 4)
    with warnings.catch_warnings(), experimental.implicit_replication():
        warnings.simplefilter("ignore")
        for written in (
            x.cumsum_(0), x.tril_(), x.addmm_(x, x), x.index_add_(0, torch.tensor([0]), row),
        ):  # fmt: skip
            assert written is x
    assert x[1:].storage_offset() == (0 if rank == 2 else 4)


@on_mesh(2)
def test_the_size_of_a_plain_tensor_is_compared(mesh):
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    whole = torch.ones(4, 2, requires_grad=True)
    with CommRecorder() as sent:
        assert whole.is_same_size(x)
        assert x.is_same_size(whole)
        assert not x.to_local().is_same_size(x)
    assert sent.ops == []


# --------------------------------------------------------------------------------------------------
# Random programs of some operators, views and writes among them, against plain torch.
# Placements, uneven and empty parts, strides of tensors, of their parts and of gradients are drawn.


NUMBERS = st.integers(0, 255)
STEPS = st.lists(st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=3, max_size=8)
PROGRAMS = {
    "codes": st.lists(NUMBERS, min_size=2, max_size=3),
    "ways": st.lists(NUMBERS, min_size=3, max_size=3),
    "program": STEPS,
    "by_extension": st.booleans(),
    "sizes": st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 1, 2)]),
}


def check(sizes, by_extension, **program):
    """Run a program; hits of plans are found by the extension, where it was built, or by Python."""
    use_native(by_extension)
    try:
        programs.check(partial(run_ranks, math.prod(sizes)), **program, sizes=sizes)
    finally:
        use_native(True)


@settings(max_examples=100)
@given(**PROGRAMS)
def test_programs_give_the_results_of_full_tensors(**program):
    check(**program)


@pytest.mark.slow
@settings(max_examples=1_250)
@given(**PROGRAMS)
@pytest.mark.parametrize("number", range(8))  # each below the limit of a test
def test_10_000_programs_give_the_results_of_full_tensors(number, **program):
    check(**program)
