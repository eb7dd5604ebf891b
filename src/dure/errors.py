"""The exception tree: what a caller can catch, and what each branch means.

    DureError
    ├── UsageError            the caller is wrong, and the same call will fail again
    │   ├── ShapeError, DtypeError, DeviceError, PlacementError (DimError),
    │   ├── MeshError (AxisError)
    │   ├── NotInGroupError, CopyError, DataError, ModuleError (HookError), OptimizerError
    │   └── ScheduleError         a pipeline's schedule that is not whole, or would deadlock
    ├── CommError             the job is in trouble; the group must be rebuilt
    │   ├── CommTimeout, PeerLost, Desync, Aborted
    ├── StoreError (StoreTimeout, StoreLost, StoreRefused), RendezvousError (RendezvousTimeout)
    ├── ReplicasDiffer        ranks that ought to have the same parameter have not
    ├── UnevenInputs          some ranks ran out of inputs before the others
    ├── PipelineError         a stage raised; all ranks of the pipeline raise this
    ├── LaunchError           carries the first failing worker's report
    ├── RpcError              carries the remote traceback
    ├── CheckpointError       CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten,
    │                         CheckpointTooNew, CheckpointException
    └── InternalError         ours; please report

Warnings have a tree of their own. Each class also derives from a class of Python, so filters for
that class apply, too:

    DureWarning
    ├── DureDeprecationWarning   FutureWarning: an argument or a form that has a successor
    ├── UsageWarning             UserWarning: a call that is probably not what was meant
    ├── PerformanceWarning       UserWarning: correct results, but slower than necessary
    ├── UnwaitedWorkWarning      RuntimeWarning: an asynchronous operation without a `wait`
    └── ForkWarning              RuntimeWarning: a child process that shares memory

torch's names for the same kinds of failure are classes between `DureError` and ours:

    DistError
    ├── DistBackendError      CommError
    ├── DistNetworkError      StoreLost, StoreRefused, RendezvousError
    └── DistStoreError        StoreError, RendezvousTimeout
        └── QueueEmptyError

When the plug-in for stock PyTorch is imported, these also derive from torch's classes of the same
names (`derive_from`), so `except torch.distributed.DistBackendError` catches a `CommError`. Without
torch, they are Dure's alone.

Every error has fields, and its message is made from them in one place, `_message`:
what failed; where (rank, group, operation number); what was seen and expected; what to try.
Tests match types and fields, never wording.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceback import StackSummary

__all__ = [
    "Aborted",
    "AxisError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointException",
    "CheckpointMismatch",
    "CheckpointNotWritten",
    "CheckpointTooNew",
    "CommError",
    "CommTimeout",
    "CopyError",
    "DataError",
    "Desync",
    "DeviceError",
    "DimError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DtypeError",
    "DureDeprecationWarning",
    "DureError",
    "DureWarning",
    "ForkWarning",
    "HookError",
    "InternalError",
    "LaunchError",
    "MeshError",
    "ModuleError",
    "NotInGroupError",
    "OptimizerError",
    "PeerLost",
    "PerformanceWarning",
    "PipelineError",
    "PlacementError",
    "QueueEmptyError",
    "RendezvousError",
    "RendezvousTimeout",
    "ReplicasDiffer",
    "RpcError",
    "ScheduleError",
    "ShapeError",
    "StoreError",
    "StoreLost",
    "StoreRefused",
    "StoreTimeout",
    "UnevenInputs",
    "UnwaitedWorkWarning",
    "UsageError",
    "UsageWarning",
]


def _message(what: str, where: str, seen: str, fix: str) -> str:
    """Join the four parts of a message; empty ones are left out."""
    text = f"{what} ({where})" if where else what
    if seen:
        text += f": {seen}"
    if fix:
        text += ("" if text.endswith((".", "!", "?")) else ".") + f" {fix}"
    return text


class DureError(Exception):
    """Anything Dure raises on purpose.

    Args:
        what: What failed, in a few words, without a full stop.
        group: Name of the process group, if there is one.
        op: The operation, such as "all_reduce".
        seq: The operation's number in its group.
        rank: This rank, within `group`.
        world_size: Ranks of `group`.
        peer: The rank that is to blame, or that was waited for.
        elapsed_s: Seconds from the call to the error.
        seen: What was seen, and what was expected.
        fix: What to try, as a sentence.
    """

    def __init__(
        self,
        what: str,
        *,
        group: str | None = None,
        op: str | None = None,
        seq: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        peer: int | None = None,
        elapsed_s: float | None = None,
        seen: str = "",
        fix: str = "",
    ) -> None:
        self.what, self.seen, self.fix = what, seen, fix
        self.group, self.op, self.seq = group, op, seq
        self.rank, self.world_size, self.peer = rank, world_size, peer
        self.elapsed_s = elapsed_s
        super().__init__(_message(what, self._where(), seen, fix))

    def _where(self) -> str:
        parts: list[str] = []
        if self.rank is not None:
            of = f" of {self.world_size}" if self.world_size is not None else ""
            parts.append(f"rank {self.rank}{of}")
        if self.group:
            parts.append(f"group {self.group!r}")
        if self.op:
            parts.append(self.op + (f" #{self.seq}" if self.seq is not None else ""))
        if self.elapsed_s is not None:
            parts.append(f"after {self.elapsed_s:.3g} s")
        return ", ".join(parts)

    def advise(self, fix: str) -> None:
        """Put `fix`, a sentence, before what the error says to try."""
        self.fix = f"{fix} {self.fix}".rstrip()
        self.args = (_message(self.what, self._where(), self.seen, self.fix),)

    def locate(self, group: str, rank: int, world_size: int) -> None:
        """Say in which group it happened, to which rank."""
        self.group, self.rank, self.world_size = group, rank, world_size
        self.args = (_message(self.what, self._where(), self.seen, self.fix),)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[DureError], args: tuple[str, ...], state: dict[str, object]) -> DureError:
    """Unpickle an error with its fields: errors cross process boundaries in tests and launch."""
    new = OSError.__new__ if issubclass(cls, OSError) else Exception.__new__  # TimeoutError is one
    error = new(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(DureError, ValueError, RuntimeError):
    """The caller is wrong, and the same call will fail again.

    torch raises ValueError for some such mistakes, RuntimeError for others.
    """


class ShapeError(UsageError):
    """A tensor, or a list of them, has the wrong number of elements or the wrong shape."""


class DtypeError(UsageError, TypeError):
    """A dtype cannot be moved, or the reduction has no meaning for it."""


class DeviceError(UsageError):
    """A tensor lies on a device, or has a layout, that the backend cannot reach."""


class PlacementError(UsageError):
    """A DTensor placement that makes no sense here."""


class DimError(PlacementError, IndexError):
    """A placement shards a dimension that the tensor does not have."""


class MeshError(UsageError, KeyError):
    """A device mesh that does not fit the world, or an axis that it does not have."""

    __str__ = Exception.__str__  # KeyError's would show the message with quotation marks


class AxisError(MeshError, IndexError):
    """The number of a mesh axis is out of range."""


class NotInGroupError(UsageError):
    """This rank is not a member of the group that it called."""


class CopyError(UsageError, TypeError):
    """A process group, or an object of yours that holds one, cannot be copied or pickled.

    DDP and meshes can be copied; sharded optimizers and modules raise `OptimizerError` and
    `ModuleError`.
    """


class DataError(UsageError):
    """A data file is missing, truncated, or not what its name says."""


class ModuleError(UsageError):
    """A module cannot be wrapped as asked; `parameters` are the paths of those concerned."""

    def __init__(self, what: str, *, parameters: tuple[str, ...] = (), **fields: object) -> None:
        self.parameters = parameters
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class OptimizerError(UsageError, TypeError):
    """A sharded optimizer cannot be made, or used, as asked."""


class ScheduleError(UsageError):
    """A pipeline's schedule is not whole, or its ranks would wait for each other forever.

    Args:
        what: What is wrong.
        index: The position in the list of `rank`, if it is a matter of one action.
        action: That action, as text.
        cycle: Who waits for whom, as (rank, action) pairs; the last waits for the first.
    """

    def __init__(
        self,
        what: str,
        *,
        index: int | None = None,
        action: str = "",
        cycle: tuple[tuple[int, str], ...] = (),
        **fields: object,
    ) -> None:
        self.index, self.action, self.cycle = index, action, cycle
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]

    def _where(self) -> str:
        position = f"index {self.index}" if self.index is not None else ""
        return ", ".join(filter(None, (super()._where(), position, self.action)))


class HookError(ModuleError, TypeError):
    """A communication hook is not what DDP can call, or failed; `parameters` are the bucket's."""


class DistError(DureError, RuntimeError):
    """A failure of communication, of the network or of the store; torch's name."""


class DistBackendError(DistError):
    """An operation of a process group failed; torch's name."""


class DistNetworkError(DistError):
    """Processes could not reach each other; torch's name."""


class DistStoreError(DistError):
    """The key-value store failed; torch's name."""


def derive_from(torch_names: object) -> None:
    """Let the classes with torch's names derive from those of `torch_names` (torch.distributed)."""
    for cls in (DistError, DistBackendError, DistNetworkError, DistStoreError, QueueEmptyError):
        base = getattr(torch_names, cls.__name__, None)
        if base is not None and not issubclass(cls, base):
            cls.__bases__ = (cls.__bases__[0], base, *cls.__bases__[1:])


class CommError(DistBackendError):
    """The job is in trouble; the group must be rebuilt."""


class CommTimeout(CommError, TimeoutError):
    """The group's time limit passed; `missing` are the ranks that did not arrive.

    `whereabouts` says of each of them, as far as it is known, what it called last and where it is.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: tuple[int, ...] = (),
        whereabouts: dict[int, str] | None = None,
        **fields: object,
    ) -> None:
        self.missing = missing
        self.whereabouts = whereabouts or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class PeerLost(CommError):
    """A peer was killed, exited or left; `peer` says which, `pid`, `host`, `exit` what is known."""

    def __init__(
        self,
        what: str,
        *,
        pid: int | None = None,
        host: str | None = None,
        exit: str | None = None,
        **fields: object,
    ) -> None:
        self.pid, self.host, self.exit = pid, host, exit
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class Desync(CommError):
    """The ranks did not call the same thing; `calls` says, for each rank, what it called."""

    def __init__(self, what: str, *, calls: dict[int, str] | None = None, **fields: object) -> None:
        self.calls = calls or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class ReplicasDiffer(DureError, RuntimeError):
    """Ranks that ought to have the same value of a parameter have not.

    `parameter` is its name; `ranks` are the sets of global ranks that agree, the largest first.
    """

    def __init__(
        self,
        what: str,
        *,
        parameter: str = "",
        step: int | None = None,
        ranks: tuple[tuple[int, ...], ...] = (),
        **fields: object,
    ) -> None:
        self.parameter, self.step, self.ranks = parameter, step, ranks
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class Aborted(CommError):
    """The group was destroyed, or aborted, while the operation was pending."""


class StoreError(DistStoreError):
    """The key-value store cannot do what was asked."""


class QueueEmptyError(StoreError):
    """`Store.queue_pop(key, block=False)` found nothing in the queue."""


class StoreTimeout(StoreError, TimeoutError):
    """A key did not appear in time; `keys` are the ones still missing."""

    def __init__(self, what: str, *, keys: tuple[str, ...] = (), **fields: object) -> None:
        self.keys = keys
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class StoreLost(StoreError, DistNetworkError, ConnectionError):
    """The process that holds the store ended, or the way to it broke; a new connection may work."""


class StoreRefused(StoreError, DistNetworkError, ConnectionError):
    """Somebody answered, but will not talk: another job key, or no store of Dure's at all.

    `foreign` says that it does not even speak as a store does.
    """

    foreign = False


class RendezvousError(DistNetworkError):
    """The ranks could not find each other, or do not agree on who they are."""


class RendezvousTimeout(RendezvousError, DistStoreError, TimeoutError):
    """Not all ranks came; `came` and `missing` say who did and who did not."""

    def __init__(
        self,
        what: str,
        *,
        came: tuple[int, ...] = (),
        missing: tuple[int, ...] = (),
        **fields: object,
    ) -> None:
        self.came, self.missing = came, missing
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class UnevenInputs(DureError, RuntimeError):
    """Some ranks ran out of inputs before the others, in a context that shall not go on then.

    `ranks` are those that ran out. The group is whole, and all ranks raise this alike.
    """

    def __init__(self, what: str, *, ranks: tuple[int, ...] = (), **fields: object) -> None:
        self.ranks = ranks
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class PipelineError(DureError, RuntimeError):
    """A stage of a pipeline raised; the group is whole, and all ranks raise this at the step's end.

    `action` is what was being done, such as "1B0", for `stage` and `microbatch` (-1: of the stage
    as a whole), on the rank `peer` of the pipeline; `remote_traceback` what that rank saw. `others`
    tells of further stages that raised by themselves in the same step.
    """

    def __init__(
        self,
        what: str,
        *,
        action: str = "",
        stage: int = -1,
        microbatch: int = -1,
        remote_traceback: str = "",
        others: tuple[str, ...] = (),
        **fields: object,
    ) -> None:
        self.action, self.stage, self.microbatch = action, stage, microbatch
        self.remote_traceback, self.others = remote_traceback, others
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class LaunchError(DureError, RuntimeError):
    """A launched job failed; torch's ChildFailedError.

    Attributes:
        report: The report of the first rank that failed.
        failures: The global ranks that failed, the first one first, to torch's fields of each:
            `local_rank`, `pid`, `exitcode`, `error_file`, `message`, `timestamp`.
    """

    def __init__(
        self,
        what: str,
        *,
        report: object = None,
        failures: dict[int, Any] | None = None,
        **fields: object,
    ) -> None:
        self.report, self.failures = report, failures or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]

    def get_first_failure(self) -> tuple[int, Any]:
        """Return the rank that failed first, and its entry of `failures`.

        Raises:
            UsageError: No rank failed, as when the ranks could not be started.
        """
        if not self.failures:
            raise UsageError("no rank failed", seen=f"the job failed: {self}")
        return next(iter(self.failures.items()))


class RpcError(DureError, RuntimeError):
    """A remote call failed; `remote_traceback` is what the callee saw."""

    def __init__(self, what: str, *, remote_traceback: str = "", **fields: object) -> None:
        self.remote_traceback = remote_traceback
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointError(DureError, RuntimeError):
    """A checkpoint cannot be written or used; `path` says which."""

    def __init__(self, what: str, *, path: str = "", **fields: object) -> None:
        self.path = path
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointDamaged(CheckpointError):
    """A checkpoint, or each one of a run, is damaged; `refused` maps paths to reasons.

    If a checkpoint could not be read (too many open files, an I/O error), it may be intact:
    that is a plain `CheckpointError`.
    """

    def __init__(
        self, what: str, *, refused: dict[str, str] | None = None, **fields: object
    ) -> None:
        self.refused = refused or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is whole, but of other objects than those to be loaded."""


class CheckpointNotWritten(CheckpointError):
    """No rank has saved, and what was saved before is as it was; `rank` failed.

    If only the last flush failed, the text says that the new checkpoint is in place.
    """


class CheckpointTooNew(CheckpointError):
    """A checkpoint is of a newer format than this release reads. It may be intact."""


class CheckpointException(CheckpointError):
    """A sharded save or load failed on some ranks; raised on all. torch's name.

    Args:
        what: What failed.
        failures: For each rank that failed, its exception and where it was raised.
    """

    def __init__(
        self,
        what: str,
        failures: dict[int, tuple[BaseException, StackSummary]] | None = None,
        **fields: object,
    ) -> None:
        self.failures = failures or {}
        told = [f"rank {rank}: {e}" for rank, (e, _) in sorted(self.failures.items())]
        super().__init__(what, **({"seen": "; ".join(told)} | fields))  # pyright: ignore


class InternalError(DureError, RuntimeError):
    """Ours; please report it."""


class DureWarning(Warning):
    """Any warning of Dure."""


class DureDeprecationWarning(DureWarning, FutureWarning):
    """The argument, the form or the class has a successor, which the text names.

    It is a `FutureWarning`, as in torch: Python hides a `DeprecationWarning` by default.
    """


def warn_deprecated(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that a name, an argument or a form has a successor.

    Args:
        old: What was used.
        new: The successor, and how it differs if it does.
        stacklevel: As for `warnings.warn`, seen from the caller; 2 is the caller's caller.
    """
    text = f"{old} is deprecated: use {new}"
    warnings.warn(text, DureDeprecationWarning, stacklevel=stacklevel + 1)


class UsageWarning(DureWarning, UserWarning):
    """The call is valid, but probably not what was meant."""


class PerformanceWarning(DureWarning, UserWarning):
    """The result is correct, but the program is slower than it has to be."""


class UnwaitedWorkWarning(DureWarning, RuntimeWarning):
    """The `Work` of an asynchronous operation was dropped before anything waited for it."""


class ForkWarning(DureWarning, RuntimeWarning):
    """This process forks while it has memory that the child will share."""
