"""Views of DTensors whose parts are stored in other orders than their specs say."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch

from dure.errors import PlacementError
from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dure.tensor.dtensor import use_native
from tests.tensor.ranks.parts import ORDERS, made
from tests.thread_ranks import on_mesh, on_ranks


@pytest.fixture(params=[True, False], ids=["extension", "Python"])
def way(request: pytest.FixtureRequest):
    use_native(request.param)
    yield
    use_native(True)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@on_ranks(2)
def test_a_view_begins_where_that_of_the_full_tensor_does(
    rank: int, placement: Shard | Replicate
) -> None:
    x = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (2,)), [placement])
    views = {
        0: x, 1: x[:, 1:], 4: x[1:], 8: x[2], 2: x.t()[2:], 3: x.view(32)[3:],
        24: x.split(2)[3],
    }  # fmt: skip
    assert [view.storage_offset() for view in views.values()] == list(views)
    assert x[:, 1:].clone().storage_offset() == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("order", ORDERS)
@on_mesh(3)
def test_flattened_parts_of_any_order_are_read_and_written_through(
    mesh: DeviceMesh, order: str
) -> None:
    full = torch.arange(24.0).reshape(3, 4, 2)
    for placement in (Shard(0), Shard(1), Replicate()):
        for _ in range(2):  # the rules are asked, then the plan is known
            x = made(mesh, full, [placement], order)
            flat = x.view(3, 4, 2, 1) if placement.is_shard(1) else x.view(12, 2)
            flat.mul_(2)
            assert torch.equal(x.full_tensor(), full * 2)
            assert torch.equal(flat.full_tensor(), (full * 2).view(flat.shape))
            assert flat.stride() == full.view(flat.shape).stride()


@pytest.mark.usefixtures("way")
@on_mesh(2)
def test_view_of_a_part_that_a_program_has_too_is_a_copy(mesh: DeviceMesh) -> None:
    full = torch.arange(24.0).reshape(2, 3, 4)
    for _ in range(2):
        mine = ORDERS["columns"](full)
        x = DTensor.from_local(mine, mesh, [Replicate()], shape=full.shape, stride=(12, 4, 1))
        flat = x.view(6, 4)
        assert torch.equal(flat.full_tensor(), full.view(6, 4))
        with pytest.raises(PlacementError, match="a view that is a copy"):
            flat.mul_(2)
        mine.mul_(2)
        assert torch.equal(x.full_tensor(), full * 2)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("order", ORDERS)
@on_mesh(2)
def test_other_dtypes_and_strided_views_of_parts_of_any_order(mesh: DeviceMesh, order: str) -> None:
    full = torch.arange(24.0).reshape(3, 4, 2)
    x = made(mesh, full, [Shard(1)], order)
    complex_numbers = torch.view_as_complex(x)
    assert torch.equal(complex_numbers.full_tensor(), torch.view_as_complex(full))
    same = made(mesh, full, [Replicate()], order)
    assert torch.equal(same.view(torch.int64).full_tensor(), full.view(torch.int64))
    assert same.as_strided((4, 3), (2, 8), 1).full_tensor()[3].tolist() == [7.0, 15.0, 23.0]


@on_mesh(2)
def test_reshape_in_inference_mode_shares_memory_where_that_of_full_tensors_does(
    mesh: DeviceMesh,
) -> None:
    rows, full = torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(4, 6)
    with torch.inference_mode():
        shared = made(mesh, full, [Replicate()], "columns")
        shared.reshape(24).add_(1)
        assert torch.equal(shared.full_tensor(), rows + 1)
        copied = made(mesh, ORDERS["columns"](full), [Replicate()], "rows")
        copied.reshape(24).add_(1)
        assert torch.equal(copied.full_tensor(), rows)
