"""Communication hooks between thread-ranks: how DDP calls them, and what happens if they fail."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

import dure as dist
from dure.errors import Desync, HookError, PeerLost
from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from dure.parallel.ddp.torch_names import BuiltinCommHookType
from dure.testing import run_ranks
from tests.parallel.ddp.ddp_models import Layers, gradients

Future = torch.futures.Future


def wrapped(n: int = 2, **options: Any) -> dist.DistributedDataParallel:
    """Return layers of which each is a bucket."""
    return dist.DistributedDataParallel(Layers(n), bucket_cap_mb=1e-6, **options)


def stepped(
    hook: Any, state: object = None, n: int = 2, value: float = 1.0
) -> dist.DistributedDataParallel:
    """Return `n` layers with a hook, and gradients of `value`."""
    ddp = wrapped(n)
    ddp.register_comm_hook(state, hook)
    ddp(torch.full((1, 2), value), *range(n)).backward()
    return ddp


def error_of(hook: Any, kind: type[Exception] = HookError) -> Any:
    """Return the error of a step whose hook fails."""
    with pytest.raises(kind) as caught:
        stepped(hook)
    return caught.value


def finished(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def no_future(state: object, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


def wrong_shape(state: object, bucket: dist.GradBucket) -> Any:
    return finished(bucket.buffer()[:-1])


def wrong_dtype(state: object, bucket: dist.GradBucket) -> Any:
    return finished(bucket.buffer().long())


def raises(state: object, bucket: dist.GradBucket) -> Any:
    raise KeyError("mine")


def raises_later(state: object, bucket: dist.GradBucket) -> Any:
    work = bucket.group.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda _: 1 / 0)


@pytest.mark.parametrize(
    ("hook", "cause"),
    [
        (no_future, type(None)),
        (wrong_shape, type(None)),
        (wrong_dtype, type(None)),
        (raises, KeyError),
        (raises_later, ZeroDivisionError),
    ],
)
def test_hook_that_fails_is_named_and_the_ranks_stay_together_2_ranks(
    hook: Any, cause: type
) -> None:
    def rank_main(rank: int) -> HookError:
        error = error_of(hook)
        dist.barrier()
        return error

    for error in run_ranks(2, rank_main):
        assert error.parameters == ("layers.1.weight",)
        assert hook.__name__ in error.what
        assert isinstance(error.__cause__, cause)


def test_hook_that_fails_after_its_collectives_on_one_rank_is_an_error_on_all_3_ranks() -> None:
    def rank_main(rank: int) -> HookError:
        def hook(state: object, bucket: dist.GradBucket) -> Any:
            good = dist.allreduce_hook(None, bucket)
            return good.then(lambda f: f.value() if rank != 1 else 1 / 0)

        error = error_of(hook)
        dist.barrier()
        return error

    errors = run_ranks(3, rank_main)
    assert isinstance(errors[1].__cause__, ZeroDivisionError)
    for error in (errors[0], errors[2]):
        assert "rank 1" in error.seen


def test_hook_that_fails_before_its_collective_on_one_rank_stops_all_3_ranks() -> None:
    def rank_main(rank: int) -> Exception:
        def hook(state: object, bucket: dist.GradBucket) -> Any:
            if rank == 1 and bucket.index() == 1:
                raise KeyError("mine")
            return dist.allreduce_hook(None, bucket)

        return error_of(hook, HookError if rank == 1 else Desync)

    first, failed, last = run_ranks(3, rank_main)
    assert isinstance(failed.__cause__, KeyError)
    for error in (first, last):
        assert any("hook" in note for note in error.__notes__)


def test_an_error_of_communication_in_a_hook_stays_what_it_is_2_ranks() -> None:
    def fails(state: object, bucket: dist.GradBucket) -> Any:
        raise PeerLost("gone")

    run_ranks(2, lambda rank: error_of(fails, PeerLost))


def bad_bucket(state: object, bucket: int) -> Future[torch.Tensor]: ...


def bad_return(state: object, bucket: dist.GradBucket) -> int: ...


def one_argument(bucket: dist.GradBucket) -> Future[torch.Tensor]: ...


@pytest.mark.parametrize("hook", [3, None, bad_bucket, bad_return, one_argument])
def test_hooks_that_cannot_be_called_are_refused_1_rank(hook: Any) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(HookError) as caught:
            wrapped().register_comm_hook(None, hook)
        assert isinstance(caught.value, (TypeError, ValueError))  # torch raises one or the other

    run_ranks(1, rank_main)


class CallableHook:
    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[list[torch.Tensor]]:
        return dist.noop_hook(state, bucket)  # pyright: ignore[reportReturnType]


def without_annotations(state, b):
    return dist.noop_hook(state, b)


CHANNELS = partial(dist.quantization_perchannel_hook, bucket_size=3)


@pytest.mark.parametrize("hook", [CallableHook(), without_annotations, dist.noop_hook, CHANNELS])
def test_any_callable_that_fits_is_a_hook_1_rank(hook: Any) -> None:
    for gradient in run_ranks(1, lambda rank: gradients(stepped(hook)))[0]:
        torch.testing.assert_close(gradient, torch.ones(2, 2), rtol=0, atol=1e-2)


@pytest.mark.parametrize("as_list", [False, True])
def test_hook_sees_each_bucket_and_reduces_it_2_ranks(as_list: bool) -> None:
    def rank_main(rank: int) -> tuple[list[torch.Tensor], list[Any]]:
        seen: list[Any] = []

        def hook(group: Any, bucket: dist.GradBucket) -> Future[Any]:
            shapes = [g.shape for g in bucket.gradients()]
            seen.append((bucket.index(), bucket.is_last(), bucket.names(), shapes))
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda f: f.value() if as_list else f.value()[0] / 2)

        ddp = wrapped()
        ddp(torch.ones(1, 2), 0, 1).backward()  # a hook may come after a step
        ddp.zero_grad()
        ddp.register_comm_hook(dist.group.WORLD, hook)
        with pytest.raises(HookError):
            ddp.register_comm_hook(None, hook)
        ddp(torch.full((1, 2), rank + 1.0), 0, 1).backward()
        return gradients(ddp), seen

    for found, seen in run_ranks(2, rank_main):
        assert all(torch.equal(g, torch.full((2, 2), 3.0 if as_list else 1.5)) for g in found)
        names = [bucket[2] for bucket in seen]
        assert sorted(names) == [["layers.0.weight"], ["layers.1.weight"]]
        assert seen == [(i, i == 1, names[i], [(2, 2)]) for i in range(2)]


def test_callbacks_start_collectives_in_one_order_on_the_ranks_own_threads_4_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[torch.Tensor], list[int], bool]:
        order: list[int] = []
        threads: set[int] = set()

        def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
            def again(future: Any) -> torch.Tensor:
                order.append(bucket.index())
                threads.add(threading.get_ident())
                work = group.all_reduce(bucket.buffer(), dist.ReduceOp.SUM, async_op=True)
                return work.get_future().wait()[0] / 16

            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(again)

        ddp = stepped(hook, dist.group.WORLD, 6, rank + 1.0)
        return gradients(ddp), order, threads == {threading.get_ident()}

    for found, order, on_own_thread in run_ranks(4, rank_main):
        # The mean of four equal sums of 1, 2, 3, 4.
        assert all(torch.equal(g, torch.full((2, 2), 2.5)) for g in found)
        assert order == list(range(6))
        assert on_own_thread


def test_hook_may_collect_futures_and_wait_in_its_body_2_ranks() -> None:
    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        parts = bucket.buffer().chunk(2)
        works = [group.all_reduce(p, dist.ReduceOp.AVG, async_op=True) for p in parts]
        futures = [work.get_future() for work in works]
        if bucket.index() == 0:
            futures[0].then(lambda f: f.value()).wait()
        return torch.futures.collect_all(futures).then(lambda _: bucket.buffer())

    def rank_main(rank: int) -> list[torch.Tensor]:
        return gradients(stepped(hook, dist.group.WORLD, value=rank + 1.0))

    for found in run_ranks(2, rank_main):
        assert all(torch.equal(g, torch.full((2, 2), 1.5)) for g in found)


def test_unused_parameters_are_known_beside_a_hook_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        ddp = wrapped(3, find_unused_parameters=True)
        ddp.register_comm_hook(None, dist.allreduce_hook)
        ddp(torch.ones(1, 2), *((0, 1) if rank == 0 else (0,))).backward()
        return [None if p.grad is None else p.grad[0, 0].item() for p in ddp.parameters()]

    assert run_ranks(2, rank_main) == [[1.0, 0.5, None]] * 2


def test_kinds_and_torchs_builtin_types_register_hooks_1_rank() -> None:
    def rank_main(rank: int) -> list[object]:
        registered: list[dist.DistributedDataParallel] = []
        for kind in DDPCommHookType:
            registered.append(wrapped())
            register_ddp_comm_hook(kind, registered[-1], dist.group.WORLD)
        for builtin in BuiltinCommHookType:
            registered.append(wrapped())
            registered[-1]._register_builtin_comm_hook(builtin)
        return [ddp._get_ddp_logging_data()["comm_hook"] for ddp in registered]

    plain = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]
    quantized = ["quantization_pertensor_hook", "quantization_perchannel_hook"]
    power = ["powerSGD_hook"] * 2 + ["batched_powerSGD_hook"] * 2
    builtin = [str(kind) for kind in BuiltinCommHookType]
    assert run_ranks(1, rank_main) == [[*plain, *quantized, *power, "noop_hook", *builtin]]
