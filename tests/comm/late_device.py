"""An accelerator without hardware, whose streams run as late as they may.

Its device type is "late". A tensor on it has memory of its own, which only its streams read and
write: `data_ptr` is an address that no process can use. Work on a stream is queued, and runs only
when the host or another stream waits for it; until then results are garbage. So a wait that is
missing gives wrong values, always.

`install` takes the process's only slot for such devices (torch's PrivateUse1), so tests use it in
processes of their own. As with CUDA, the threads of a process share the default stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device, backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from dure.comm.backends import staged

_aten: Any = torch.ops.aten
_FAR = 1 << 60
_GARBAGE = 0x5A
_one_at_a_time = threading.RLock()
_threads = threading.local()
_READ_BY_HOST = {
    *(_aten._local_scalar_dense.default, _aten.item.default, _aten.equal.default),
    _aten.is_nonzero.default,
}


class Event:
    """A place in a stream's queue."""

    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.run_to(self._place)

    def query(self) -> bool:
        return self._stream.num_run >= self._place


class Stream:
    """Work that runs in order, when it is waited for."""

    def __init__(self, device: object = None) -> None:
        self._queue: list[Callable[[], object]] = []
        self.num_run = 0

    def add(self, work: Callable[[], object]) -> None:
        with _one_at_a_time:
            self._queue.append(work)

    def record_event(self, event: object = None) -> Event:
        return Event(self, len(self._queue))

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def synchronize(self) -> None:
        self.run_to(len(self._queue))

    def run_to(self, place: int) -> None:
        with _one_at_a_time, torch.inference_mode():
            while self.num_run < place:
                work = self._queue[self.num_run]
                self._queue[self.num_run] = int
                self.num_run += 1
                work()


_default = Stream()
used: list[tuple[int, object]] = []
"""Addresses of tensors, and streams that `record_stream` named for them."""


class _Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module` returns for the device."""

    Stream, Event = Stream, Event

    def current_stream(self, device: object = None) -> Stream:
        return getattr(_threads, "stream", _default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        _threads.stream = stream
        try:
            yield
        finally:
            _threads.stream = before

    def synchronize(self, device: object = None) -> None:
        self.current_stream().synchronize()


device = _Module()


class LateTensor(torch.Tensor):
    """A tensor on the device; `memory` is what only streams may touch."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> LateTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device("late:0"),
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def data_ptr(self) -> int:
        return _FAR + self.memory.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: object) -> None:
        used.append((self.data_ptr(), stream))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        result = _run(func, _memories(args), _memories(given), args)
        return given.get("out", result)


def _memories(value: Any) -> Any:
    return tree_map_only(LateTensor, lambda t: t.memory, value)


def _run(func: Any, args: Any, kwargs: dict[str, Any], given: Any) -> Any:
    """Run an operator on memory: a view at once, anything else in the current stream."""
    stream, wanted = device.current_stream(), kwargs.get("device")
    to_host = func is _aten._to_copy.default and wanted is not None and wanted.type == "cpu"
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    if func in _READ_BY_HOST or to_host:
        stream.synchronize()
        return func(*args, **kwargs)
    if func.is_view:
        return tree_map_only(torch.Tensor, LateTensor, func(*args, **kwargs))
    if func._schema.is_mutable:
        stream.add(lambda: func(*args, **kwargs))
        if func is _aten.copy_.default and not (len(args) > 2 and args[2]):
            stream.synchronize()
        return given[0] if given else None
    made = func(*args, **kwargs)  # of the right shape; its values are not used
    results = tree_map_only(torch.Tensor, lambda t: LateTensor(_garbage(t)), made)

    def work() -> None:
        for result, value in zip(
            tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True
        ):
            result.memory.copy_(value)

    stream.add(work)
    return results


def _garbage(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    made.untyped_storage().fill_(_GARBAGE)
    return made


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), _GARBAGE, dtype=torch.uint8, device="cpu")


_library = torch.library.Library("aten", "IMPL")


class Everywhere(TorchFunctionMode):
    """Makes tensors on the device where a program names none."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _device._device_constructors() or "device" in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})).to("late", non_blocking=True)


def install() -> None:
    """Make the device known to this process."""
    backend_registration._setup_privateuseone_for_python_backend("late", device)
    staged._pinned = _pinned

    def empty(size: Any, dtype: Any = None, **options: object) -> LateTensor:
        plain = torch.empty(size, dtype=dtype or torch.get_default_dtype(), device="cpu")
        return LateTensor(_garbage(plain))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **options: object) -> LateTensor:
        kind = dtype or torch.get_default_dtype()
        return LateTensor(_garbage(torch.empty_strided(size, stride, dtype=kind, device="cpu")))

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        given = (target, source, non_blocking)
        return _run(_aten.copy_.default, _memories(given), {}, given)

    _library.impl("_copy_from", copy_from, "PrivateUse1")  # where subclasses are not asked
    _library.impl("empty.memory_format", empty, "PrivateUse1")
    _library.impl("empty_strided", empty_strided, "PrivateUse1")
