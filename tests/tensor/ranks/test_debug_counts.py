"""What DTensors communicate, counted by module, and who has what, drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from dure.comm import functional
from dure.errors import PlacementError
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.debug import CommDebugMode, visualize_sharding
from dure.testing import run_ranks
from tests.thread_ranks import on_mesh, on_ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Partial(), Replicate()),
        (Partial("avg"), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
    ],
)
@on_mesh(2, 1)
def test_nothing_is_sent_along_an_axis_of_one_rank(mesh, before, after):
    local = torch.arange(6.0).reshape(2, 3)
    x = DTensor.from_local(local, mesh, [Replicate(), before])
    with CommDebugMode() as counts:
        moved = x.redistribute(placements=[Replicate(), after]).to_local()
    assert counts.get_total_counts() == 0
    assert torch.equal(moved, local)
    moved.zero_()
    assert local.sum() == 15


@on_mesh(2)
def test_counts_are_kept_under_the_operators_of_torch(mesh):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        x.full_tensor()
        mesh.get_group().all_reduce(torch.ones(1))
    counts, gather = mode.get_comm_counts(), torch.ops.c10d_functional.all_gather_into_tensor
    assert set(counts) == {gather, torch.ops.c10d.allreduce_}
    assert counts == {gather: 1, torch.ops.c10d.allreduce_: 1}
    assert (counts != dict(counts)) is False
    assert counts != {gather: 2, torch.ops.c10d.allreduce_: 1}
    assert counts[torch.ops._c10d_functional.all_gather_into_tensor] == 1


@on_ranks(2)
def test_counts_are_found_by_the_names_of_torch(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    terms = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    mode = CommDebugMode()
    with mode:
        x.full_tensor()
        terms.full_tensor()
        terms.redistribute(placements=[Shard(0)])
        x.redistribute(placements=[Shard(1)])
        if rank == 0:  # what one rank calls is not counted by the others
            terms.redistribute(placements=[Partial()])
        mesh.get_group().all_reduce(torch.ones(1))
        mesh.get_group().broadcast(torch.ones(1), 0)
        seen = torch.ones(2, requires_grad=True)
        reduced = functional.all_reduce(seen, "sum", mesh)
        assert isinstance(reduced, functional.AsyncCollectiveTensor)
        reduced.wait().sum().backward()
        x.softmax(0)  # the largest values, and the sums
    counts, gather = mode.get_comm_counts(), torch.ops.c10d_functional.all_gather_into_tensor
    assert counts == {
        gather: 1,
        torch.ops._c10d_functional.all_reduce: 5,
        "c10d_functional.reduce_scatter_tensor": 1,
        "c10d_functional.all_to_all_single": 1,
        "c10d.allreduce_": 1,
        "c10d.broadcast_": 1,
    }
    assert counts[gather] == 1
    assert gather in counts
    assert counts.get(torch.ops.c10d.scatter_, 5) == 5
    assert counts["c10d.scatter_"] == 0
    assert mode.get_total_counts() == 10
    with mode:
        pass
    assert mode.get_total_counts() == 0


def test_counts_of_an_operator_are_one_though_torch_has_made_it_twice():
    """As for two threads that ask for it at once: each gets its own, and torch keeps one."""

    def count(_: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        with CommDebugMode() as mode:
            DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor()
        return mode.get_comm_counts()

    functional_ops: Any = torch.ops.c10d_functional
    kept = functional_ops.all_reduce
    first = run_ranks(2, count)[0]
    del functional_ops.all_reduce
    try:
        second = run_ranks(2, count)[0]
        assert functional_ops.all_reduce is not kept
        assert dict(first) == dict(second) == {kept: 1}
        assert second[functional_ops.all_reduce] == 1
    finally:
        functional_ops.all_reduce = kept


@on_ranks(4)
def test_each_thread_rank_counts_its_own(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    with CommDebugMode() as mode:
        for _ in range(rank // 2 + 1):  # the ranks of an inner group do the same
            x.redistribute(placements=[Shard(0), Replicate()])
    assert mode.get_total_counts() == [1, 1, 2, 2][rank]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


def distributed(mesh: Any) -> Block:
    torch.manual_seed(0)
    block = Block()
    block.up.weight = distribute_tensor(block.up.weight, mesh, [Shard(0)])  # pyright: ignore
    block.down.weight = distribute_tensor(block.down.weight, mesh, [Shard(1)])  # pyright: ignore
    return block


def test_counts_by_module(tmp_path):
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        block = distributed(mesh)
        x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])
        with CommDebugMode() as mode:
            out = block(x)
            whole = out.redistribute(placements=[Replicate()])
            whole.backward(torch.ones_like(whole))
        assert mode.get_comm_counts() == {"c10d_functional.all_reduce": 1}
        assert mode.get_sharding_info() == {
            "Block.up.weight": (Shard(0),),
            "Block.down.weight": (Shard(1),),
        }
        one, reduce = {"forward": {}, "backward": {}}, torch.ops.c10d_functional.all_reduce
        assert mode.comm_counts == {reduce: 1}
        assert mode.comm_module_counts == {"Global": one | {"forward": {reduce: 1}}}
        assert list(mode.get_parameter_info()) == ["Block.up", "Block.down"]
        table = mode.generate_comm_debug_tracing_table(noise_level=3)
        assert "*c10d_functional.all_reduce: 1" in table
        assert "Block.down" in table
        assert "**aten.mm.default" in table
        assert "aten.mm" not in mode.generate_comm_debug_tracing_table(noise_level=0)
        if rank == 0:
            mode.generate_json_dump(str(tmp_path / "log.json"), noise_level=1)
            mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"))

    run_ranks(2, body)
    told = json.loads((tmp_path / "log.json").read_text())
    assert [module["name"] for module in told["modules"]] == ["Block", "Block.up", "Block.down"]
    assert "Block.up" in (tmp_path / "log.txt").read_text()


def test_who_has_what_is_drawn(capsys):
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        visualize_sharding(
            distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)]), header="both"
        )
        visualize_sharding(distribute_tensor(torch.ones(3), mesh, [Replicate(), Shard(0)]))
        visualize_sharding(torch_free := distribute_tensor(torch.ones(0), mesh))
        assert torch_free.numel() == 0
        with pytest.raises(PlacementError):
            visualize_sharding(distribute_tensor(torch.ones(2, 2, 2), mesh))

    run_ranks(4, body)
    assert capsys.readouterr().out == (
        "both\n"
        "         Col 0-1  Col 2-3\n"
        "Row 0-2  cpu:0    cpu:1\n"
        "Row 3-4  cpu:2    cpu:3\n"
        "\n"
        "Row 0-1  cpu:0,2\n"
        "Row 2-2  cpu:1,3\n"
    )


def test_drawing_with_rich(capsys):
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]), use_rich=True)

    run_ranks(2, body)
    printed = capsys.readouterr().out
    assert "Col 2-3" in printed
    assert "cpu:1" in printed
