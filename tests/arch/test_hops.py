"""From the user's all_reduce to the C++ loop it is four hops (docs/walkthrough_all_reduce.md)."""

import sys

import torch

import dure
from dure.comm.world import current_world

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
