"""The properties and the lifetime of a group, for torch.distributed.

Torch's `ProcessGroup` is a C++ class that dispatches to backends by device. Our Python subclass has
no such backends and overrides every method. Python callers use its methods directly; C++ callers
use those with C++ names, such as `getGroupName` and `splitGroup`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dure.comm.futures import Waiters
from dure.comm.group import ProcessGroup
from dure.comm.monitored import monitored_barrier
from dure.comm.recording import end_recording
from dure.comm.work import Work, combine
from dure.errors import DeviceError
from dure.torch_backend import NAME
from dure.torch_backend.calls import Mode
from dure.torch_backend.work import CompletedWork, TorchWork, UnwaitedWorks
from dure.torch_private import c10d

__all__ = ["NoBackendForDevice", "TorchBackendOptions", "TorchGroupBase", "live_groups"]

if TYPE_CHECKING:
    Base = object  # torch's stub names parameters otherwise than torch's callers do
else:
    Base = c10d.ProcessGroup

live_groups: weakref.WeakSet[TorchGroupBase] = weakref.WeakSet()
"""Groups that exist; `create` closes them when the program ends."""

_COMPLETED = CompletedWork()


class NoBackendForDevice(DeviceError, RuntimeError):
    """The group does not serve this kind of device; torch's callers expect a RuntimeError."""


class TorchBackendOptions:
    """The `backend.options` that torch and programs read and set.

    Args:
        group: The group; setting `_timeout` changes its timeout.
    """

    def __init__(self, group: TorchGroupBase) -> None:
        self._group = group
        self.backend = group.name()
        self.group_name = group.group_name
        self.global_ranks_in_group = list(group.ours.global_ranks)

    @property
    def _timeout(self) -> timedelta:
        return self._group.ours.timeout

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __deepcopy__(self, memo: object) -> TorchBackendOptions:
        """Return new options of the same group: `split_group` copies those of the parent."""
        del memo
        return TorchBackendOptions(self._group)


class TorchGroupBase(Base):
    """The properties of a group, and the conversion of works.

    Args:
        ours: The group of Dure that runs the operations.
        store: Torch's store for this group.
        name: The backend's name.

    Attributes:
        ours: The group of Dure that runs the operations.
        options: The settings that torch's backends have.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, ours: ProcessGroup, store: c10d.Store, name: str) -> None:
        super().__init__(ours.rank(), ours.size())  # pyright: ignore[reportCallIssue]
        self.ours, self._torch_store, self._backend_name = ours, store, name
        self._name, self._desc = ours.group_name, ours.desc
        self._unwaited, self._waiters = UnwaitedWorks(), Waiters("dure-torch-future")
        self._process = os.getpid()
        self.options = TorchBackendOptions(self)
        live_groups.add(self)

    # ---------------------------------------------------------------- names

    def rank(self) -> int:
        """Return this rank's number within the group."""
        return self.ours.rank()

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.ours.size()

    getRank, getSize = rank, size

    def name(self) -> str:
        """Return the backend's name."""
        return self._backend_name

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return "dure": C++ takes a group called "gloo" for its own class."""
        return NAME

    @property
    def group_name(self) -> str:
        """The group's name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's description."""
        return self._desc

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {self.ours!r})"

    # ---------------------------------------------------------------- devices and abilities

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self.ours.device_types)]

    def _get_backend(self, device: torch.device) -> TorchGroupBase:
        if torch.device(device).type not in self.ours.device_types:
            raise NoBackendForDevice(
                f"the group has no backend for {device}",
                group=self._name,
                seen=f"it serves {', '.join(sorted(self.ours.device_types))}",
                fix="Make another group for tensors on that device.",
            )
        return self

    def get_group_store(self) -> c10d.Store:
        """Return torch's store for this group."""
        return self._torch_store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the group has no allocator."""
        del device
        return False

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing: a new group is connected."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: works have no hooks."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing: `dure.trace` measures the time of every operation."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 0 on all ranks."""

    def _get_sequence_number_for_group(self) -> int:
        return self.ours.seq

    # ---------------------------------------------------------------- running an operation

    def _wrap(self, work: Work | None, mode: Mode, value: object = None) -> c10d.Work:
        """Return torch's work for ours; for None, the work of a completed operation."""
        if work is None:
            return _COMPLETED
        wrapped = TorchWork(work, self._unwaited, self._waiters, mode[1], value)
        if not mode[0]:
            wrapped.wait()
        return wrapped

    def run_aside(self, job: Callable[[], object]) -> None:
        """Run `job` on a thread that waits for this group's operations."""
        self._waiters.run(job)

    def _joined(
        self, works: Sequence[Work | None], outputs: list[torch.Tensor], mode: Mode
    ) -> c10d.Work:
        """Return one of torch's works for several of ours."""
        ours = combine([w for w in works if w is not None], outputs, async_op=True)
        return self._wrap(ours, mode)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error names the ranks that did not arrive."""
        monitored_barrier(self.ours, timeout, wait_all_ranks)

    # ---------------------------------------------------------------- life

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait for their peers."""
        self.ours.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; pending operations end with `Aborted`."""
        self._leave(abort=False)

    def abort(self) -> None:
        """Leave the group without waiting for pending operations."""
        self._leave(abort=True)

    def _leave(self, abort: bool) -> None:
        live_groups.discard(self)
        if self._process != os.getpid():
            return  # a forked child: the group is its parent's
        self.ours.close(abort)
        end_recording()
        self._waiters.close()
        self._unwaited.clear()

    def leave_at_exit(self) -> None:
        """Leave at the end of a program that has not left the group, so that peers notice it."""
        self._leave(abort=True)
