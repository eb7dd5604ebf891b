"""DDP's behaviour between ranks, on thread-ranks: what it sends, verifies, refuses and survives."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure import trace
from dure.errors import ModuleError, PeerLost
from dure.testing import run_ranks
from ranks.ddp_models import Branches


@contextmanager
def recorded() -> Iterator[list[trace.Event]]:
    """Collect the operations that all thread-ranks start."""
    events: list[trace.Event] = []
    hook = trace.add_hook(before=events.append)
    try:
        yield events
    finally:
        trace.remove_hook(hook)


def test_step_is_one_reduction_a_bucket_and_nothing_else_2_ranks() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])  # 16640 bytes a layer

    def rank_main(rank: int) -> int:
        ddp = dist.DistributedDataParallel(model_of[rank], bucket_cap_mb=0.03)
        dist.barrier()
        for _ in range(2):
            with ddp.no_sync():
                ddp(torch.ones(1, 64)).sum().backward()
            ddp(torch.ones(1, 64)).sum().backward()
        return len(ddp.reducer.buckets)

    model_of = [model, nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])]
    with recorded() as events:
        buckets = run_ranks(2, rank_main)
    assert buckets == [2, 2]
    for rank in range(2):
        ops = [e.op for e in events if e.rank == rank]
        # Once, rank 0 tells in which order gradients became ready.
        steps = [*["all_reduce"] * 2, "broadcast", *["all_reduce"] * 2]
        assert ops[ops.index("barrier") + 1 :] == steps


def test_ranks_with_different_models_all_name_the_first_difference() -> None:
    def rank_main(rank: int) -> ModuleError:
        layers = [nn.Linear(2, 3), nn.Linear(3, 5 if rank == 1 else 4), nn.Linear(4, 1)]
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(nn.Sequential(*layers))
        return caught.value

    for error in run_ranks(3, rank_main):
        assert error.parameters == ("1.weight",)
        assert "ranks 0, 2 have 1.weight float32[4, 3]" in error.seen
        assert "rank 1 has 1.weight float32[5, 3]" in error.seen


@pytest.mark.parametrize("change", ["dtype", "count", "frozen", "name", "buffer"])
def test_any_difference_between_models_is_refused_2_ranks(change: str) -> None:
    def rank_main(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if rank == 1:
            if change == "dtype":
                model[0].double()
            elif change == "count":
                model.append(nn.Linear(1, 1))
            elif change == "frozen":
                model[0].bias.requires_grad_(False)
            elif change == "name":
                model = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.BatchNorm1d(2))
            else:
                model[1].register_buffer("extra", torch.ones(1))
        with pytest.raises(ModuleError):
            dist.DistributedDataParallel(model)

    run_ranks(2, rank_main)


def test_no_sync_is_undone_when_its_body_raises_1_rank() -> None:
    def rank_main(rank: int) -> bool:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        return ddp.require_backward_grad_sync

    assert run_ranks(1, rank_main) == [True]


@pytest.mark.parametrize("as_list", [False, True])
def test_comm_hook_reduces_instead_2_ranks(as_list: bool) -> None:
    seen: list[tuple[int, bool, int, int]] = []

    def rank_main(rank: int) -> list[Any]:
        def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
            if rank == 0:
                seen.append(
                    (
                        bucket.index(),
                        bucket.is_last(),
                        len(bucket.gradients()),
                        bucket.buffer().numel(),
                    )
                )
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda f: f.value() if as_list else f.value()[0] / 2)

        ddp = dist.DistributedDataParallel(Branches(), bucket_cap_mb=1e-6)
        ddp.register_comm_hook(dist.group.WORLD, hook)
        ddp(torch.full((1, 2), rank + 1.0), "left", "right").backward()
        with pytest.raises(ModuleError):
            ddp.register_comm_hook(None, hook)
        return [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]

    expected = 3.0 if as_list else 1.5
    for grads in run_ranks(2, rank_main):
        assert grads == [[[expected] * 2] * 2] * 2
    assert seen == [(0, False, 1, 4), (1, True, 1, 4)]


def test_state_dict_has_torchs_names_1_rank() -> None:
    def rank_main(rank: int) -> list[str]:
        return list(dist.DistributedDataParallel(nn.BatchNorm1d(1)).state_dict())

    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert run_ranks(1, rank_main) == [[f"module.{n}" for n in names]]


def test_copy_and_pickle_come_back_working_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[float], list[float]]:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ddp(torch.ones(1, 1)).sum().backward()
        loaded = pickle.loads(pickle.dumps(ddp))
        copied = copy.deepcopy(ddp)
        for other in (loaded, copied):
            other.zero_grad()
            other(torch.full((1, 1), rank + 1.0)).sum().backward()
        assert ddp.module.weight.grad.item() == 1
        grads = [other.module.weight.grad.item() for other in (loaded, copied)]
        return grads, [
            other.module.weight.item() - ddp.module.weight.item() for other in (loaded, copied)
        ]

    assert run_ranks(2, rank_main) == [([1.5, 1.5], [0, 0])] * 2


def test_copy_of_a_module_on_another_group_is_refused_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1), process_group=dist.new_group([0, 1]))
        with pytest.raises(ModuleError):
            copy.deepcopy(ddp)

    run_ranks(2, rank_main)


def test_ignored_parameters_are_neither_broadcast_nor_reduced_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[float, float]:
        module = Branches()
        module.right.weight.data.fill_(rank)
        module._ddp_params_and_buffers_to_ignore = ["right.weight"]  # pyright: ignore
        ddp = dist.DistributedDataParallel(module)
        ddp(torch.full((1, 2), rank + 1.0), "left", "right").backward()
        assert module.left.weight.grad is not None
        assert module.right.weight.grad is not None
        return module.right.weight[0, 0].item(), module.right.weight.grad[0, 0].item()

    assert run_ranks(2, rank_main) == [(0.0, 1.0), (1.0, 2.0)]


def test_backward_on_another_thread_uses_the_ranks_group_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        loss = ddp(torch.full((1, 1), rank + 1.0)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return ddp.module.weight.grad.flatten().tolist()

    assert run_ranks(2, rank_main) == [[1.5], [1.5]]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_accepted_1_rank() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        values: list[float] = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 2.0)).pow(2).sum().backward(create_graph=True)
            values.append((ddp.module.weight.grad / ddp.module.weight).item())
        return values

    assert run_ranks(1, rank_main)[0] == pytest.approx([8.0] * 3)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (nn.Module(), {}),
        (nn.Linear(1, 1).requires_grad_(False), {}),
        (nn.LazyLinear(1), {}),
        (nn.Linear(1, 1), {"device_ids": [0]}),
        (nn.BatchNorm1d(1, affine=False), {}),
        (nn.Linear(1, 1), {"bucket_cap_mb": 0}),
        (nn.Linear(1, 1), {"delay_all_reduce_named_params": []}),
        (nn.Linear(1, 1), {"device_mesh": object()}),
        (nn.Linear(1, 1), {"mixed_precision": torch.bfloat16}),
        (nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)), {}),
    ],
    ids=[
        "empty",
        "frozen",
        "lazy",
        "device-of-cpu-module",
        "only-buffers",
        "no-bytes",
        "delayed",
        "no-mesh",
        "dtype-for-precision",
        "batch-norm-of-torch",
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_module_that_cannot_be_wrapped_is_refused_1_rank(
    module: nn.Module, options: dict[str, Any]
) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(ModuleError):
            dist.DistributedDataParallel(module, **options)
        with pytest.raises(RuntimeError):  # what programs written for torch catch
            dist.DistributedDataParallel(module, **options)

    run_ranks(1, rank_main)


def test_rank_that_leaves_is_named_by_backward_2_ranks() -> None:
    def rank_main(rank: int) -> int | None:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
        if rank == 1:
            return None
        with pytest.raises(PeerLost) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        return caught.value.peer

    assert run_ranks(2, rank_main) == [1, None]


def test_step_times_cover_the_step_2_ranks() -> None:
    def rank_main(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(nn.Linear(4, 4))
        ddp(torch.ones(1, 4)).sum().backward()
        return ddp.step_times

    for times in run_ranks(2, rank_main):
        assert times.forward_s > 0
        assert times.backward_s > 0
        assert times.comm_s > 0
        assert 0 < times.exposed_comm_s < 30
        assert 0 <= times.overlap_s <= times.backward_s


def test_wrapping_twice_is_refused_unless_ignored_1_rank() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        whole = nn.Sequential(nn.Linear(1, 1), dist.DistributedDataParallel(nn.Linear(1, 1)))
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(whole)
        dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            whole, caught.value.parameters
        )
        dist.DistributedDataParallel(whole)
        with pytest.raises(ModuleError):
            dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, ["x"])
        return caught.value.parameters

    assert run_ranks(1, rank_main) == [("1.module.weight", "1.module.bias")]


def test_buckets_of_listed_sizes_1_rank() -> None:
    def rank_main(rank: int) -> list[int]:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]  # 1/64 MiB each
        ddp = dist.DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb_list=[1 / 64, 2 / 64]
        )
        return [len(bucket.views) for bucket in ddp.reducer.buckets]

    assert run_ranks(1, rank_main) == [[1, 2, 2]]


def test_module_outlives_its_group_only_wrapped_again_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
        ddp(torch.ones(1, 1)).sum().backward()
        dist.shrink()
        with pytest.raises(ModuleError):
            ddp(torch.ones(1, 1))
        ddp = dist.DistributedDataParallel(ddp.module)
        ddp(torch.ones(1, 1)).sum().backward()

    run_ranks(2, rank_main)
