"""What one rank of a large job does, counted: for tests that it does not grow with the ranks."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import dure
from dure.mesh import DeviceMesh, init_device_mesh
from tests.waiting import PATIENCE_S


@contextmanager
def one_rank_of(ranks: int) -> Iterator[DeviceMesh]:
    """Be a rank in the middle of a world whose other ranks do not exist; yield a mesh of all."""
    limit = timedelta(seconds=PATIENCE_S)
    dure.init_process_group("fake", rank=ranks // 2, world_size=ranks, timeout=limit)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    finally:
        dure.destroy_process_group()


class _Operators(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def num_operators(run: Callable[[], object]) -> int:
    """Return how many ATen operators `run` calls."""
    with _Operators() as seen:
        run()
    return seen.num


def num_calls(run: Callable[[], object]) -> int:
    """Return how many functions `run` calls, of Python and C."""
    num = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what is freed meanwhile may call functions
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num


def num_bytecodes(run: Callable[[], object]) -> int:
    """Return how many instructions of Python `run` executes; a loop without calls counts, too."""
    num = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        gc.enable()
    return num


def kept_objects(run: Callable[[], object]) -> int:
    """Return how many objects that the garbage collector visits `run` leaves behind."""
    gc.collect()
    before = len(gc.get_objects())
    kept = run()
    gc.collect()
    left = len(gc.get_objects()) - before
    del kept
    return left


def kept_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of Python objects that `run` leaves behind."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = run()
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        del kept
        return left
    finally:
        tracemalloc.stop()
