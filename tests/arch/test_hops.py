"""From the user's all_reduce to the C++ loop it is five hops (docs/walkthrough_all_reduce.md)."""

import sys

import torch

import dure
from dure.comm.backends.shm import ShmBackend
from dure.comm.world import current_world

HOPS_IN_PYTHON = ["all_reduce", "ProcessGroup.all_reduce", "ShmBackend.all_reduce"]
HOPS_IN_CPP = ["Engine::all_reduce", "Group::all_reduce"]


class Watched:
    """Stands before the native group, and sees through which functions a call has come."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.hops: list[str] = []

    def all_reduce(self, *args):
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] != __name__:
            self.hops.insert(0, _named(frame))
            frame = frame.f_back
        return self.engine.all_reduce(*args)

    def close(self) -> None:
        self.engine.close()


def _named(frame) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return f"{type(owner).__name__}.{name}" if owner is not None else name


def test_all_reduce_reaches_the_engine_in_five_hops(tmp_path):
    with dure.process_group("shm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1):
        group = current_world().default
        assert group is not None
        backend = group._backends["cpu"]
        assert isinstance(backend, ShmBackend)
        watched = Watched(backend._group)
        backend._group = watched  # type: ignore[assignment]
        tensor = torch.ones(4)
        dure.all_reduce(tensor)
    assert watched.hops == HOPS_IN_PYTHON
    assert len(HOPS_IN_PYTHON) + len(HOPS_IN_CPP) == 5
