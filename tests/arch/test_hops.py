"""Hops from a user's call to what moves data.

From an all_reduce to the C++ loop it is four (docs/walkthrough_all_reduce.md). From a linear layer
with a sharded weight to the collective it is five: files that the call goes through
(ARCHITECTURE.md).
"""

import sys
from itertools import groupby

import torch

import dure
from arch.sources import PACKAGE, ROOT
from dure import trace
from dure.comm.world import current_world
from dure.tensor import Shard, distribute_tensor, dtensor, init_device_mesh
from dure.testing import run_ranks

HOPS_IN_PYTHON = ["all_reduce", "ProcessGroup.all_reduce"]
HOPS_IN_CPP = ["Engine::plain_all_reduce", "Channel::run"]


class Watched:
    """Stands before the native group, and sees through which functions a call has come."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.hops: list[str] = []

    def plain_all_reduce(self, *args):
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] != __name__:
            self.hops.insert(0, _named(frame))
            frame = frame.f_back
        return self.engine.plain_all_reduce(*args)

    def close(self) -> None:
        self.engine.close()


def _named(frame) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return f"{type(owner).__name__}.{name}" if owner is not None else name


def test_all_reduce_reaches_the_engine_in_four_hops(tmp_path):
    with dure.process_group("shm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1):
        group = current_world().default
        assert group is not None
        watched = Watched(group._plain)
        group._plain = watched  # type: ignore[assignment]
        tensor = torch.ones(4)
        dure.all_reduce(tensor)
    assert watched.hops == HOPS_IN_PYTHON
    assert len(HOPS_IN_PYTHON) + len(HOPS_IN_CPP) == 4


# ---- a linear layer on a sharded weight ----------------------------------------------------------

HOPS_OF_LINEAR = [
    "tensor/dtensor.py",
    "tensor/dispatch.py",
    "tensor/redistribute.py",
    "comm/differentiable.py",
    "comm/group/operations.py",
]


def _files_on_the_way() -> list[str]:
    """Return the files of Dure that the call has come through since it left this one."""
    files: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        files.insert(0, frame.f_code.co_filename)
        frame = frame.f_back
    ours = (name.removeprefix(f"{PACKAGE}/") for name in files if name.startswith(str(PACKAGE)))
    return [name for name, _ in groupby(ours)]


def test_linear_on_a_sharded_weight_reaches_the_collective_in_five_hops():
    def body(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.rand(4, 6), mesh, [Shard(0)])
        weight = distribute_tensor(torch.rand(8, 6), mesh, [Shard(0)])
        torch.nn.functional.linear(x, weight)  # the first call also asks the rule, and plans
        seen: list[list[str]] = []

        def look(event: trace.Event) -> None:
            if event.global_rank == rank:
                seen.append(_files_on_the_way())

        hook = trace.add_hook(before=look)
        torch.nn.functional.linear(x, weight)
        trace.remove_hook(hook)
        (hops,) = seen  # one collective: the rows of x, or of the weight, are gathered
        return hops[: len(HOPS_OF_LINEAR)]

    dtensor.use_native(False)  # the extension stands in the place of the first hop
    try:
        assert run_ranks(2, body) == [HOPS_OF_LINEAR] * 2
    finally:
        dtensor.use_native(True)
    page = (ROOT / "ARCHITECTURE.md").read_text()
    told = page.partition("## One linear")[2].partition("\n## ")[0]
    places = [told.find(f"`{name}`") for name in HOPS_OF_LINEAR]
    assert -1 not in places
    assert places == sorted(places)
