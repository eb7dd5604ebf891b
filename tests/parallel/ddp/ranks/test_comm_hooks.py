"""Communication hooks between thread-ranks: how DDP calls them, and what happens if they fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dure as dist
from dure.errors import Desync, HookError
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
def test_hook_that_fails_is_named_and_the_ranks_stay_together_2_ranks(hook, cause):
    def rank_main(rank: int) -> HookError:
        error = error_of(hook)
        dist.barrier()
        return error

    for error in run_ranks(2, rank_main):
        assert error.parameters == ("layers.1.weight",)
        assert hook.__name__ in error.what
        assert isinstance(error.__cause__, cause)


def test_hook_that_fails_after_its_collectives_on_one_rank_is_an_error_on_all_3_ranks():
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


def test_hook_that_fails_before_its_collective_on_one_rank_stops_all_3_ranks():
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


def bad_bucket(state: object, bucket: int) -> Future[torch.Tensor]: ...


def bad_return(state: object, bucket: dist.GradBucket) -> int: ...


def one_argument(bucket: dist.GradBucket) -> Future[torch.Tensor]: ...


@pytest.mark.parametrize("hook", [3, None, bad_bucket, bad_return, one_argument])
def test_hooks_that_cannot_be_called_are_refused_1_rank(hook):
    def rank_main(rank: int) -> None:
        with pytest.raises(HookError) as caught:
            wrapped().register_comm_hook(None, hook)
        assert isinstance(caught.value, (TypeError, ValueError))  # torch raises one or the other

    run_ranks(1, rank_main)


@pytest.mark.parametrize("as_list", [False, True])
def test_hook_sees_each_bucket_and_reduces_it_2_ranks(as_list):
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
