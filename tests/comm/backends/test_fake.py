"""Dry runs: one process is a rank of a world of any size, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore
from torch.fx.experimental.proxy_tensor import make_fx

import dure
from dure import checkpoint
from dure.checkpoint import HuggingFaceStorageWriter
from dure.comm import functional
from dure.device_mesh import init_device_mesh
from dure.errors import CommError, ShapeError, UsageError
from dure.fsdp import fully_shard
from dure.tensor import DTensor, Shard
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    if dure.is_initialized():
        dure.destroy_process_group()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def start(rank: int = 1, size: int = 3) -> None:
    limit = timedelta(seconds=PATIENCE_S)
    dure.init_process_group("fake", rank=rank, world_size=size, timeout=limit)


def test_a_store_is_not_needed_and_any_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for store in (None, HashStore(), dure.HashStore()):
        dure.init_process_group("fake", rank=0, world_size=2, store=store)  # pyright: ignore
        dure.destroy_process_group()
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "5")
    dure.init_process_group("fake")
    assert (dure.get_rank(), dure.get_world_size()) == (4, 5)


def three() -> list[torch.Tensor]:
    return [torch.full((2,), float(r)) for r in range(3)]


def zeros(n: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(n)]


def test_collectives_write_what_this_rank_knows_and_nothing_else() -> None:
    start()
    x = 5 * ones(2)
    for reduced in (dure.all_reduce, lambda t: dure.reduce(t, 0), lambda t: dure.broadcast(t, 0)):
        reduced(x)
        assert x.tolist() == [5, 5]
    dure.all_gather(out := zeros(), x.requires_grad_())
    assert [t.tolist() for t in out] == [[5, 5]] * 3
    dure.all_gather_single(one := torch.zeros(6), x)
    assert one.tolist() == [5] * 6
    dure.gather(x, out := zeros(), dst=1)
    assert [t.tolist() for t in out] == [[5, 5]] * 3
    dure.gather(x, None, dst=0)
    dure.scatter(y := torch.zeros(2), three(), src=1)
    assert y.tolist() == [1, 1]
    dure.scatter(y, None, src=0)
    assert y.tolist() == [1, 1]
    dure.reduce_scatter(y, [3 * t for t in three()])
    assert y.tolist() == [3, 3]
    dure.reduce_scatter_single(y, torch.arange(6.0))
    assert y.tolist() == [2, 3]
    dure.all_to_all(out := zeros(), three())
    assert [t.tolist() for t in out] == [[0, 0], [1, 1], [2, 2]]
    dure.all_to_all_single(z := torch.full((4,), 9.0), torch.arange(3.0), [2, 1, 1], [1, 1, 1])
    assert z.tolist() == [0, 0, 1, 2]


def test_nothing_waits_for_the_other_ranks() -> None:
    start()
    dure.barrier()
    dure.monitored_barrier()
    dure.send(x := ones(2), 2)
    assert dure.recv(x, 2) == 2
    work = dure.all_reduce(x, async_op=True)
    assert work is not None
    assert work.wait()
    for request in dure.batch_isend_irecv(
        [dure.P2POp(dure.isend, x, 0), dure.P2POp(dure.irecv, ones(2), 2)]
    ):
        request.wait()
    assert x.tolist() == [1, 1]
    kept = ["a", "b", "c"]
    dure.broadcast_object_list(kept, src=0)
    dure.recv_object_list(kept, src=0)
    dure.scatter_object_list(kept, None, src=0)
    assert kept == ["a", "b", "c"]
    dure.all_gather_object(kept, {"rank": 1})
    assert kept == [{"rank": 1}] * 3


def test_groups_are_made_without_the_other_ranks() -> None:
    start()
    assert dure.new_group([0, 1]).rank() == 1  # pyright: ignore
    assert dure.new_group([0, 2]) is dure.GroupMember.NON_GROUP_MEMBER
    part = dure.split_group(split_ranks=[[0], [1, 2]])
    assert part is not None
    assert part.global_ranks == (1, 2)  # pyright: ignore
    assert dure.all_gather_single(torch.zeros(4), ones(2), group=part) is None  # pyright: ignore
    assert functional.all_reduce(ones(2), "sum", part).tolist() == [1, 1]
    for refused in (lambda: dure.new_group([0, 1], backend="gloo"), dure.shrink):
        with pytest.raises(UsageError):
            refused()


def test_a_mesh_of_ten_thousand_ranks_holds_dtensors_and_fully_shard() -> None:
    start(207, 10_000)
    mesh = init_device_mesh("cpu", (100, 100), mesh_dim_names=("dp", "tp"))
    assert tuple(mesh.get_coordinate() or ()) == (2, 7)
    tensor = DTensor.from_local(ones(2, 3), mesh, [Shard(0), Shard(1)])
    assert tensor.shape == (200, 300)
    assert (tensor * 2).full_tensor()[0, 0] == 2
    model = torch.nn.Linear(8, 100)
    fully_shard(model, mesh=mesh["dp"])
    model(ones(1, 8)).sum().backward()
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert weight.grad is not None
    assert weight.to_local().shape == (1, 8)


@pytest.mark.parametrize("values", ["meta", "fake"])
def test_tensors_without_values_are_left_as_they_are(values: str) -> None:
    start()
    with torch.device("meta") if values == "meta" else FakeTensorMode():
        x, out = ones(2), zeros()
        for call in (
            lambda: dure.all_reduce(x),
            lambda: dure.all_gather(out, x),
            lambda: dure.reduce_scatter_single(x, ones(6)),
            lambda: dure.all_to_all_single(ones(6), ones(6)),
            lambda: dure.send(x, 0),
            lambda: dure.all_reduce_coalesced([x, ones(3)]),
        ):
            assert call() is None
        assert dure.recv(x, 0) == 0
        messages = [dure.P2POp(dure.isend, x, 0), dure.P2POp(dure.irecv, ones(2), 0)]
        assert all(work.wait() for work in dure.batch_isend_irecv(messages))
        with pytest.raises(ShapeError):
            dure.all_gather_single(ones(5), x)

    def captured(t: torch.Tensor) -> None:
        dure.all_reduce(t)

    with pytest.raises(UsageError):
        make_fx(captured, tracing_mode="fake")(ones(2))


def test_fully_shard_is_run_without_values() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.t()  # the bias gets no gradient

    start()
    mesh = init_device_mesh("cpu", (3,))
    with FakeTensorMode():
        model = fully_shard(Layer(4, 6), mesh=mesh, reshard_after_forward=False)
        for _ in range(2):
            model(ones(2, 4)).sum().backward()
            gradient = model.weight.grad
            assert isinstance(gradient, DTensor)
            assert gradient.to_local().shape == (2, 4)


def test_saving_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    start()
    state = {"w": ones(2)}
    for save in (
        lambda: checkpoint.save(state, checkpoint_id=tmp_path / "a"),
        lambda: checkpoint.async_save(state, checkpoint_id=tmp_path / "a"),
        lambda: checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(tmp_path / "a")),
        lambda: checkpoint.Checkpointer(tmp_path / "a").save(1, w=state),
    ):
        with pytest.raises(UsageError):
            save()
    assert list(tmp_path.iterdir()) == []


def test_options_are_used_or_refused() -> None:
    class Options:
        error_on_collective = True

    dure.init_process_group("fake", rank=0, world_size=2, pg_options=Options())
    with pytest.raises(CommError):
        dure.barrier()
    dure.destroy_process_group()
    with pytest.raises(UsageError):
        dure.init_process_group(
            "gloo", store=dure.HashStore(), rank=0, world_size=1, pg_options=Options()
        )
