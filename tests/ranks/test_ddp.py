"""DDP's behaviour between ranks, on thread-ranks: what it sends, verifies, refuses and survives."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, PeerLost
from dure.testing import CommRecorder, run_ranks
from ranks.ddp_models import Branches


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def test_step_is_one_reduction_a_bucket_and_nothing_else_2_ranks() -> None:
    def rank_main(rank: int) -> list[str]:
        layers = [nn.Linear(64, 64) for _ in range(4)]  # 16640 bytes a layer
        ddp = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)
        with CommRecorder(rank=rank) as seen:
            for _ in range(2):
                with ddp.no_sync():
                    ddp(torch.ones(1, 64)).sum().backward()
                ddp(torch.ones(1, 64)).sum().backward()
        return seen.ops

    # Once, rank 0 sends the order in which gradients became ready.
    step = ["all_reduce"] * 2
    assert run_ranks(2, rank_main) == [[*step, "broadcast", *step]] * 2


def test_buckets_of_listed_sizes_1_rank() -> None:
    def rank_main(rank: int) -> object:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]  # 1/64 MiB each
        caps = [1 / 64, 2 / 64]
        ddp = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb_list=caps)
        return ddp._get_ddp_logging_data()["bucket_sizes"]

    one = 64 * 64 * 4
    assert run_ranks(1, rank_main) == [f"{one}, {2 * one}, {2 * one}"]


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


def with_norm(*before: nn.Module) -> nn.Sequential:
    return nn.Sequential(*before, nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].double(),
        lambda m: m.append(nn.Linear(1, 1)),
        lambda m: m[0].bias.requires_grad_(False),
        lambda m: m[1].register_buffer("extra", torch.ones(1)),
        lambda m: m.insert(0, nn.Identity()),
    ],
    ids=["dtype", "count", "frozen", "buffer", "name"],
)
def test_any_difference_between_models_is_refused_2_ranks(change: Any) -> None:
    def rank_main(rank: int) -> None:
        model = with_norm()
        if rank == 1:
            change(model)
        with pytest.raises(ModuleError):
            dist.DistributedDataParallel(model)

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (nn.Module(), {}),
        (linear().requires_grad_(False), {}),
        (nn.LazyLinear(1), {}),
        (linear(), {"device_ids": [0]}),
        (nn.BatchNorm1d(1, affine=False), {}),
        (linear(), {"bucket_cap_mb": 0}),
        (linear(), {"delay_all_reduce_named_params": []}),
        (linear(), {"device_mesh": object()}),
        (linear(), {"mixed_precision": torch.bfloat16}),
        (nn.Sequential(linear(), nn.SyncBatchNorm(1)), {}),
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
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(module, **options)
        assert isinstance(caught.value, RuntimeError)  # what programs written for torch catch

    run_ranks(1, rank_main)


def test_wrapping_twice_is_refused_unless_ignored_1_rank() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ignore = dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        whole = nn.Sequential(linear(), dist.DistributedDataParallel(nn.Linear(1, 1)))
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(whole)
        ignore(whole, caught.value.parameters)
        dist.DistributedDataParallel(whole)
        with pytest.raises(ModuleError):
            ignore(whole, ["x"])
        return caught.value.parameters

    assert run_ranks(1, rank_main) == [("1.module.weight", "1.module.bias")]


def test_ignored_parameters_are_neither_broadcast_nor_reduced_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[float, ...]:
        module = Branches()
        module.right.weight.data.fill_(rank)
        module._ddp_params_and_buffers_to_ignore = ["right.weight"]
        ddp = dist.DistributedDataParallel(module)
        ddp(torch.full((1, 2), rank + 1.0), "left", "right").backward()
        right = module.right.weight
        return tuple(t[0, 0].item() for t in (right, right.grad, module.left.weight.grad))

    assert run_ranks(2, rank_main) == [(0.0, 1.0, 1.5), (1.0, 2.0, 1.5)]


def test_no_sync_is_undone_when_its_body_raises_1_rank() -> None:
    def rank_main(rank: int) -> bool:
        ddp = dist.DistributedDataParallel(linear())
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        return ddp.require_backward_grad_sync

    assert run_ranks(1, rank_main) == [True]


def test_copy_and_pickle_come_back_working_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(linear())
        ddp(torch.ones(1, 1)).sum().backward()
        for other in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
            assert list(other.state_dict()) == ["module.weight"]
            assert torch.equal(other.module.weight, ddp.module.weight)
            other.zero_grad()
            other(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert other.module.weight.grad.item() == 1.5
        assert ddp.module.weight.grad.item() == 1

    run_ranks(2, rank_main)


def test_copy_of_a_module_on_another_group_is_refused_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(linear(), process_group=dist.new_group([0, 1]))
        with pytest.raises(ModuleError):
            copy.deepcopy(ddp)

    run_ranks(2, rank_main)


def test_backward_on_another_thread_uses_the_ranks_group_2_ranks() -> None:
    def rank_main(rank: int) -> float:
        ddp = dist.DistributedDataParallel(linear())
        thread = threading.Thread(target=ddp(torch.full((1, 1), rank + 1.0)).sum().backward)
        thread.start()
        thread.join()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, rank_main) == [1.5, 1.5]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_accepted_1_rank() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(linear())
        values: list[float] = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 2.0)).pow(2).sum().backward(create_graph=True)
            values.append((ddp.module.weight.grad / ddp.module.weight).item())
        return values

    assert run_ranks(1, rank_main)[0] == pytest.approx([8.0] * 3)


def test_rank_that_leaves_is_named_by_backward_2_ranks() -> None:
    def rank_main(rank: int) -> int | None:
        ddp = dist.DistributedDataParallel(linear())
        if rank == 1:
            return None
        with pytest.raises(PeerLost) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        return caught.value.peer

    assert run_ranks(2, rank_main) == [1, None]


def test_module_outlives_its_group_only_wrapped_again_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(linear())
        ddp(torch.ones(1, 1)).sum().backward()
        dist.shrink()
        with pytest.raises(ModuleError):
            ddp(torch.ones(1, 1))
        ddp = dist.DistributedDataParallel(ddp.module)
        ddp(torch.ones(1, 1)).sum().backward()

    run_ranks(2, rank_main)


def test_functional_call_leaves_gradients_to_its_caller_2_ranks() -> None:
    def rank_main(rank: int) -> float:
        ddp = dist.DistributedDataParallel(linear())
        weight = torch.ones(1, 1, requires_grad=True)
        x = torch.full((1, 1), rank + 1.0)
        with CommRecorder() as seen:
            torch.func.functional_call(ddp, {"module.weight": weight}, x).sum().backward()
        assert seen.ops == []
        assert ddp.module.weight.grad is None
        ddp(x).sum().backward()
        assert ddp.module.weight.grad.item() == 1.5
        return weight.grad.item()

    assert run_ranks(2, rank_main) == [1.0, 2.0]


def one_replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(1, 1))


def all_replaced(module: nn.Linear) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


@pytest.mark.parametrize(
    ("replace", "names"), [(one_replaced, ("weight",)), (all_replaced, ("weight", "bias"))]
)
def test_parameters_replaced_for_good_are_named_2_ranks(
    replace: Any, names: tuple[str, ...]
) -> None:
    def rank_main(_: int) -> None:
        module = nn.Linear(1, 1)
        ddp = dist.DistributedDataParallel(module)
        replace(module)
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        assert caught.value.parameters == names

    run_ranks(2, rank_main)
