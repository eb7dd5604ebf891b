"""Works of the plug-in: which are kept, and what is kept of them."""

from __future__ import annotations

import threading
import weakref

import torch
import torch.distributed

from dure.comm.futures import Waiters
from dure.comm.work import Work
from dure.torch_backend.work import TorchWork, UnwaitedWorks


class Pending:
    """A request that ends when told to."""

    source = -1

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


def test_dropped_work_is_kept_and_gives_up_large_tensors_when_it_has_ended():
    unwaited, request, kept = UnwaitedWorks(), Pending(), []
    for numel in (1 << 20, 1):
        tensor = torch.zeros(numel)
        kept.append(weakref.ref(tensor))
        TorchWork(Work(request, [tensor]), unwaited, Waiters())  # pyright: ignore[reportArgumentType]
        del tensor
    assert None not in [ref() for ref in kept]
    request.over.set()
    for _ in range(2):
        TorchWork(Work(None, []), unwaited, Waiters())
    assert [ref() is None for ref in kept] == [True, False]
    unwaited.clear()
    assert kept[1]() is None


def test_waited_work_is_not_kept():
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    unwaited = UnwaitedWorks()
    TorchWork(Work(None, [tensor]), unwaited, Waiters()).wait()
    del tensor
    assert kept() is None
