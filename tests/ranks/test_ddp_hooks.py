"""Communication hooks between thread-ranks: how DDP runs them, and what the built-in ones send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import Desync, HookError
from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from dure.parallel.ddp.torch_names import BuiltinCommHookType
from dure.testing import CommRecorder, run_ranks

Future = torch.futures.Future


class Layers(nn.Module):
    """Layers of which a forward uses those it is told to use; every one is a bucket."""

    def __init__(self, n: int = 2, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))

    def forward(self, x: torch.Tensor, *use: int) -> torch.Tensor:
        return torch.stack([self.layers[i](x).sum() for i in use]).sum()


def wrapped(n: int = 2, width: int = 2, **options: Any) -> dist.DistributedDataParallel:
    torch.manual_seed(0)
    return dist.DistributedDataParallel(Layers(n, width), bucket_cap_mb=1e-6, **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def no_future(state: object, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


def wrong_shape(state: object, bucket: dist.GradBucket) -> Any:
    future: Future[Any] = Future()
    future.set_result(bucket.buffer()[:-1])
    return future


def wrong_dtype(state: object, bucket: dist.GradBucket) -> Any:
    future: Future[Any] = Future()
    future.set_result(bucket.buffer().long())
    return future


def raises(state: object, bucket: dist.GradBucket) -> Any:
    raise KeyError("mine")


def raises_later(state: object, bucket: dist.GradBucket) -> Any:
    work = bucket.group.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: 1 / 0)


@pytest.mark.parametrize("hook", [no_future, wrong_shape, wrong_dtype, raises, raises_later])
def test_hook_that_fails_is_named_and_the_ranks_stay_together_2_ranks(hook: Any) -> None:
    def rank_main(rank: int) -> HookError:
        ddp = wrapped()
        ddp.register_comm_hook(None, hook)
        with pytest.raises(HookError) as caught:
            ddp(torch.ones(1, 2), 0, 1).backward()
        dist.barrier()
        return caught.value

    for error in run_ranks(2, rank_main):
        assert error.parameters == ("layers.1.weight",)
        assert hook.__name__ in error.what
        if hook in (raises, raises_later):
            assert isinstance(error.__cause__, (KeyError, ZeroDivisionError))


def test_hook_that_fails_after_its_collectives_on_one_rank_is_an_error_on_all_3_ranks() -> None:
    def rank_main(rank: int) -> HookError:
        def hook(state: object, bucket: dist.GradBucket) -> Any:
            good = dist.allreduce_hook(None, bucket)
            return good.then(lambda f: f.value() if rank != 1 else 1 / 0)

        ddp = wrapped()
        ddp.register_comm_hook(None, hook)
        with pytest.raises(HookError) as caught:
            ddp(torch.ones(1, 2), 0, 1).backward()
        dist.barrier()
        return caught.value

    errors = run_ranks(3, rank_main)
    assert isinstance(errors[1].__cause__, ZeroDivisionError)
    for error in (errors[0], errors[2]):
        assert "rank 1" in error.seen


def test_hook_that_fails_before_its_collective_on_one_rank_stops_all_3_ranks() -> None:
    errors: list[BaseException | None] = [None] * 3

    def rank_main(rank: int) -> None:
        def hook(state: object, bucket: dist.GradBucket) -> Any:
            if rank == 1 and bucket.index() == 1:
                raise KeyError("mine")
            return dist.allreduce_hook(None, bucket)

        ddp = wrapped()
        ddp.register_comm_hook(None, hook)
        try:
            ddp(torch.ones(1, 2), 0, 1).backward()
        except (HookError, Desync) as error:
            errors[rank] = error

    run_ranks(3, rank_main, timeout=10.0)
    assert isinstance(errors[1], HookError)
    assert isinstance(errors[1].__cause__, KeyError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, Desync)
        assert any("hook" in note for note in error.__notes__)


def bad_bucket(state: object, bucket: int) -> Future[torch.Tensor]: ...


def bad_return(state: object, bucket: dist.GradBucket) -> int: ...


def one_argument(bucket: dist.GradBucket) -> Future[torch.Tensor]: ...


@pytest.mark.parametrize("hook", [3, None, bad_bucket, bad_return, one_argument])
def test_what_cannot_be_a_hook_is_refused_1_rank(hook: Any) -> None:
    def rank_main(rank: int) -> None:
        ddp = wrapped()
        with pytest.raises(HookError) as caught:
            ddp.register_comm_hook(None, hook)
        assert isinstance(caught.value, (TypeError, ValueError))  # torch raises one or the other

    run_ranks(1, rank_main)


def test_any_callable_that_fits_is_a_hook_1_rank() -> None:
    class Callable_:
        def __call__(self, state: object, bucket: dist.GradBucket) -> Future[list[torch.Tensor]]:
            return dist.noop_hook(state, bucket)  # pyright: ignore[reportReturnType]

    def loose(state, b):  # pyright: ignore
        return dist.noop_hook(state, b)

    channels = partial(dist.quantization_perchannel_hook, bucket_size=3)

    def rank_main(rank: int) -> None:
        for hook in (Callable_(), loose, dist.noop_hook, channels):
            ddp = wrapped()
            ddp.register_comm_hook(None, hook)
            ddp(torch.ones(1, 2), 0, 1).backward()
            for gradient in gradients(ddp):
                assert torch.allclose(gradient, torch.ones(2, 2), atol=1e-2)

    run_ranks(1, rank_main)


def test_hook_may_come_after_a_step_and_only_once_2_ranks() -> None:
    def rank_main(rank: int) -> list[torch.Tensor]:
        ddp = wrapped()
        ddp(torch.ones(1, 2), 0, 1).backward()
        ddp.zero_grad()
        ddp.register_comm_hook(None, dist.noop_hook)
        with pytest.raises(HookError):
            ddp.register_comm_hook(None, dist.noop_hook)
        ddp(torch.full((1, 2), rank + 1.0), 0, 1).backward()
        return gradients(ddp)

    for rank, found in enumerate(run_ranks(2, rank_main)):
        assert all(torch.equal(g, torch.full((2, 2), rank + 1.0)) for g in found)


def test_callbacks_that_start_collectives_do_so_in_one_order_on_all_ranks_4_ranks() -> None:
    order: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def rank_main(rank: int) -> list[torch.Tensor]:
        def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
            def again(future: Any) -> torch.Tensor:
                order[rank].append(bucket.index())
                work = group.all_reduce(bucket.buffer(), dist.ReduceOp.SUM, async_op=True)
                assert work is not None
                return work.get_future().wait()[0] / 16

            before = threading.active_count()
            work = group.all_reduce(bucket.buffer(), async_op=True)
            assert work is not None
            future = work.get_future().then(again)
            assert threading.active_count() <= before  # no thread waits for it
            return future

        ddp = wrapped(6)
        ddp.register_comm_hook(world(), hook)
        ddp(torch.full((1, 2), rank + 1.0), *range(6)).backward()
        return gradients(ddp)

    for found in run_ranks(4, rank_main):  # the mean of four equal sums of 1, 2, 3, 4
        assert all(torch.equal(g, torch.full((2, 2), 2.5)) for g in found)
    assert all(order[rank] == list(range(6)) for rank in range(4))


def test_hook_may_collect_futures_and_wait_in_its_body_2_ranks() -> None:
    def rank_main(rank: int) -> list[torch.Tensor]:
        def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
            parts = bucket.buffer().chunk(2)
            works = [group.all_reduce(p, dist.ReduceOp.AVG, async_op=True) for p in parts]
            futures = [work.get_future() for work in works if work is not None]
            if bucket.index() == 0:
                futures[0].then(lambda f: f.value()).wait()
                assert futures[0].done()
            collected = torch.futures.collect_all(futures)
            return collected.then(lambda _: bucket.buffer())

        ddp = wrapped()
        ddp.register_comm_hook(world(), hook)
        ddp(torch.full((1, 2), rank + 1.0), 0, 1).backward()
        return gradients(ddp)

    for found in run_ranks(2, rank_main):
        assert all(torch.equal(g, torch.full((2, 2), 1.5)) for g in found)


def test_unused_parameters_go_with_hooks_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        ddp = wrapped(3, find_unused_parameters=True)
        ddp.register_comm_hook(None, dist.allreduce_hook)
        ddp(torch.ones(1, 2), *((0, 1) if rank == 0 else (0,))).backward()
        return [None if p.grad is None else p.grad[0, 0].item() for p in ddp.parameters()]

    assert run_ranks(2, rank_main) == [[1.0, 0.5, None]] * 2


def test_sparse_gradients_go_through_the_hooks_that_average_2_ranks() -> None:
    def rank_main(rank: int, hook: Any, state: Any) -> torch.Tensor:
        ddp = dist.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
        ddp.register_comm_hook(state, hook)
        ddp(torch.tensor([rank, 2])).sum().backward()
        gradient = ddp.module.weight.grad
        assert gradient.is_sparse
        return gradient.to_dense()[:, 0]

    power = dist.PowerSGDState(None, start_powerSGD_iter=0)
    hooks = [(dist.allreduce_hook, None), (dist.fp16_compress_hook, None)]
    for hook, state in [*hooks, (dist.powerSGD_hook, power)]:
        for found in run_ranks(2, rank_main, hook, state):
            assert found.tolist() == [0.5, 0.5, 1, 0]


HOOKS: dict[str, tuple[Callable[..., Any], float]] = {
    "allreduce": (dist.allreduce_hook, 4),
    "fp16": (dist.fp16_compress_hook, 2),
    "bf16": (dist.bf16_compress_hook, 2),
    "fp16 around": (dist.fp16_compress_wrapper(dist.allreduce_hook), 2),
    "bf16 around": (dist.bf16_compress_wrapper(dist.allreduce_hook), 2),
    "noop": (dist.noop_hook, 0),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_send_what_they_say_3_ranks(name: str) -> None:
    hook, bytes_each = HOOKS[name]

    def rank_main(rank: int) -> list[torch.Tensor]:
        ddp = wrapped(3, 16)
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((1, 16), rank + 1.0), 0, 1, 2).backward()
        with CommRecorder() as seen:
            ddp.zero_grad()
            ddp(torch.full((1, 16), rank + 1.0), 0, 1, 2).backward()
        bitmap = 4 * (3 + 1)
        assert seen.ops == ["all_reduce"] * (4 if bytes_each else 1)
        assert seen.nbytes() == 3 * 256 * bytes_each + bitmap
        return gradients(ddp)

    for rank, found in enumerate(run_ranks(3, rank_main)):
        expected = 2.0 if bytes_each else rank + 1.0
        assert all(torch.equal(g, torch.full((16, 16), expected)) for g in found)


@pytest.mark.parametrize("per_channel", [False, True])
def test_eight_bits_are_off_by_half_a_level_at_most_3_ranks(per_channel: bool) -> None:
    kind = "QUANTIZE_PER_CHANNEL" if per_channel else "QUANTIZE_PER_TENSOR"

    def rank_main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ddp = dist.DistributedDataParallel(nn.Linear(40, 30, bias=False))
        register_ddp_comm_hook(DDPCommHookType[kind], ddp)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
        plain = nn.Linear(40, 30, bias=False)
        plain(x).sum().backward()
        assert plain.weight.grad is not None
        mean = plain.weight.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        with CommRecorder() as seen:
            ddp(x).sum().backward()
        scales = 3 if per_channel else 1  # of 1200 numbers
        payload = scales * 8 + (3 * 512 if per_channel else 1200)
        assert seen.nbytes("all_gather_single") + seen.nbytes("all_gather") == payload
        return ddp.module.weight.grad, mean

    for found, mean in run_ranks(3, rank_main):
        assert (found - mean).abs().max() < 0.5 * 30 / 255
        assert not torch.equal(found, mean)


def test_kinds_and_torchs_builtin_types_register_hooks_1_rank() -> None:
    def rank_main(rank: int) -> list[str]:
        names: list[str] = []
        for kind in DDPCommHookType:
            ddp = wrapped()
            register_ddp_comm_hook(kind, ddp, world())
            names.append(ddp.reducer.hook_name)
        for builtin in BuiltinCommHookType:
            ddp = wrapped()
            ddp._register_builtin_comm_hook(builtin)
            names.append(ddp.reducer.hook_name)
        return names

    names = run_ranks(1, rank_main)[0]
    power = ["powerSGD_hook"] * 2 + ["batched_powerSGD_hook"] * 2
    quantized = ["quantization_pertensor_hook", "quantization_perchannel_hook"]
    builtin = [str(kind) for kind in BuiltinCommHookType]
    plain = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]
    assert names == [*plain, *quantized, *power, "noop_hook", *builtin]


def test_post_local_hook_leaves_the_group_for_the_subgroup_4_ranks() -> None:
    def rank_main(rank: int, reduce: bool) -> list[float]:
        pair, _ = dist.new_subgroups(2)
        state = dist.PostLocalSGDState(None, pair, 2, reduce)
        ddp = wrapped()
        ddp.register_comm_hook(state, dist.post_localSGD_hook)
        found: list[float] = []
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.full((1, 2), float(rank)), 0, 1).backward()
            found.append(gradients(ddp)[0][0, 0].item())
        assert state.iter == 4
        return found

    for rank, found in enumerate(run_ranks(4, rank_main, True)):
        assert found == [1.5, 1.5, *[0.5 + rank // 2 * 2] * 2]
    for rank, found in enumerate(run_ranks(4, rank_main, False)):
        assert found == [1.5, 1.5, *[float(rank)] * 2]


class Waves(nn.Module):
    """A complex parameter whose gradient is 1 + 2j, and an empty one, each a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 2))

    def forward(self) -> torch.Tensor:
        return (self.wave.real + 2 * self.wave.imag).sum() + self.nothing.sum()


COMPRESSING = [*list(DDPCommHookType)[1:-1], dist.fp16_compress_wrapper(dist.allreduce_hook)]


@pytest.mark.parametrize("kind", COMPRESSING)
def test_compressed_gradients_may_be_complex_and_empty_2_ranks(kind: Any) -> None:
    def rank_main(rank: int) -> torch.Tensor:
        ddp = dist.DistributedDataParallel(Waves(), bucket_cap_mb=1e-6)
        if isinstance(kind, DDPCommHookType):
            register_ddp_comm_hook(kind, ddp)
        else:
            ddp.register_comm_hook(None, kind)
        if (hook := ddp.reducer.reductions.hook) and isinstance(hook.state, dist.PowerSGDState):
            hook.state.start_powerSGD_iter = 0
        ddp().backward()
        return ddp.module.wave.grad

    for found in run_ranks(2, rank_main):
        torch.testing.assert_close(found, torch.full((2,), 1 + 2j), rtol=0.01, atol=0)
