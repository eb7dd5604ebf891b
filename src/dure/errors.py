"""The exception tree.

    DureError
    ├── UsageError            the caller is wrong, and the same call will fail again
    │   ├── ShapeError, DtypeError, DeviceError, PlacementError (DimError),
    │   ├── MeshError (AxisError)
    │   ├── NotInGroupError, CopyError, DataError, ModuleError (HookError), OptimizerError
    │   ├── TorchVersionError     this torch lacks something that Dure needs
    │   └── ScheduleError         a pipeline's schedule is incomplete, or would deadlock
    ├── CommError             the group is broken and must be made again
    │   ├── CommTimeout, PeerLost, Desync, Aborted
    ├── StoreError (StoreTimeout, StoreLost, StoreRefused), RendezvousError (RendezvousTimeout)
    ├── ReplicasDiffer        ranks have different values of a replicated parameter
    ├── UnevenInputs          some ranks ran out of inputs before the others
    ├── PipelineError         a stage raised; all ranks of the pipeline raise this
    ├── LaunchError           has the report of the first rank that failed
    ├── RpcError              has the remote traceback
    ├── CheckpointError       CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten,
    │                         CheckpointTooNew, CheckpointException
    └── InternalError         a bug of Dure; please report it

The tree of warnings. Each class also derives from one of Python's, so that filters for that class
apply:

    DureWarning
    ├── DureDeprecationWarning   FutureWarning: an argument or a form that has a successor
    ├── UsageWarning             UserWarning: a valid call that is probably a mistake
    ├── PerformanceWarning       UserWarning: correct results, but slower than necessary
    ├── UnwaitedWorkWarning      RuntimeWarning: an asynchronous operation without a `wait`
    └── ForkWarning              RuntimeWarning: a fork that does not copy all results

torch's exception classes are between `DureError` and ours:

    DistError
    ├── DistBackendError      CommError
    ├── DistNetworkError      StoreLost, StoreRefused, RendezvousError
    └── DistStoreError        StoreError, RendezvousTimeout
        └── QueueEmptyError

After an import of the plug-in for stock PyTorch, these also derive from torch's classes of the same
names (`derive_from`), so `except torch.distributed.DistBackendError` catches a `CommError`.

`_message` makes the message of an error from its fields: the failure; the place (rank, group,
operation number); the values that were seen and expected; a fix.
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
    "TorchVersionError",
    "UnevenInputs",
    "UnwaitedWorkWarning",
    "UsageError",
    "UsageWarning",
]


def _message(what: str, where: str, seen: str, fix: str) -> str:
    """Join the four parts of a message, except empty ones."""
    text = f"{what} ({where})" if where else what
    if seen:
        text += f": {seen}"
    if fix:
        text += ("" if text.endswith((".", "!", "?")) else ".") + f" {fix}"
    return text


class DureError(Exception):
    """The base class of all errors that Dure raises.

    Args:
        what: The failure in a few words, without a full stop; also an attribute, as all arguments.
        group: Name of the process group.
        op: The operation, such as "all_reduce".
        seq: The operation's number in its group.
        rank: This rank, within `group`.
        world_size: Number of ranks of `group`.
        peer: The rank that caused the error, or that was waited for.
        elapsed_s: Seconds from the call to the error.
        seen: The values that were seen, and those that were expected.
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
        """Insert a sentence before the error's `fix`.

        Args:
            fix: What to try, as a sentence.
        """
        self.fix = f"{fix} {self.fix}".rstrip()
        self.args = (_message(self.what, self._where(), self.seen, self.fix),)

    def locate(self, group: str, rank: int, world_size: int) -> None:
        """Set the group and the rank of the error.

        Args:
            group: Name of the process group.
            rank: The rank within it.
            world_size: Number of its ranks.
        """
        self.group, self.rank, self.world_size = group, rank, world_size
        self.args = (_message(self.what, self._where(), self.seen, self.fix),)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[DureError], args: tuple[str, ...], state: dict[str, object]) -> DureError:
    """Unpickle an error with its fields: errors are sent between processes."""
    new = OSError.__new__ if issubclass(cls, OSError) else Exception.__new__  # TimeoutError is one
    error = new(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(DureError, ValueError, RuntimeError):
    """The caller is wrong, and the same call will fail again.

    It is a ValueError and a RuntimeError, because torch raises one or the other.
    """


class ShapeError(UsageError):
    """A tensor, or a list of them, has the wrong number of elements or the wrong shape."""


class DtypeError(UsageError, TypeError):
    """A dtype cannot be moved, or the reduction has no meaning for it."""


class DeviceError(UsageError):
    """The backend does not support a tensor's device or layout."""


class PlacementError(UsageError):
    """A DTensor placement is not valid here."""


class DimError(PlacementError, IndexError):
    """A placement shards a dimension that the tensor does not have."""


class MeshError(UsageError, KeyError):
    """A device mesh does not fit the world, or does not have the requested axis."""

    __str__ = Exception.__str__  # KeyError's would show the message with quotation marks


class AxisError(MeshError, IndexError):
    """The number of a mesh axis is out of range."""


class NotInGroupError(UsageError):
    """This rank is not a member of the group of the operation."""


class CopyError(UsageError, TypeError):
    """A process group, or an object that refers to one, cannot be copied or pickled.

    DDP and meshes can be copied. For sharded optimizers and modules the errors are
    `OptimizerError` and `ModuleError`.
    """


class DataError(UsageError):
    """A data file is missing, truncated, or of another kind than its name says."""


class ModuleError(UsageError):
    """A module cannot be wrapped with these options.

    Attributes:
        parameters: Names of the affected parameters.
    """

    def __init__(self, what: str, *, parameters: tuple[str, ...] = (), **fields: object) -> None:
        self.parameters = parameters
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class OptimizerError(UsageError, TypeError):
    """A sharded optimizer cannot be made or used with these arguments."""


class ScheduleError(UsageError):
    """A pipeline's schedule is incomplete, or its ranks would wait for each other forever.

    Args:
        what: The problem, in a few words.
        index: Position of the faulty action in the list of `rank`, if there is one.
        action: That action, as text.
        cycle: A cycle of waits, as (rank, action) pairs; the last waits for the first.
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
    """A communication hook of DDP is invalid, or failed.

    Attributes:
        parameters: Names of the bucket's parameters.
    """


class TorchVersionError(UsageError, ImportError):
    """The installed torch lacks something that Dure, or the imported part of it, needs.

    The message has what is missing, torch's version, and the versions that work. Importing other
    parts of Dure may succeed.
    """


class DistError(DureError, RuntimeError):
    """Communication, the network or the store failed; torch's name."""


class DistBackendError(DistError):
    """An operation of a process group failed; torch's name."""


class DistNetworkError(DistError):
    """Processes could not reach each other; torch's name."""


class DistStoreError(DistError):
    """The key-value store failed; torch's name."""


def derive_from(torch_names: object) -> None:
    """Make the classes with torch's names derive from those of the module `torch_names`."""
    for cls in (DistError, DistBackendError, DistNetworkError, DistStoreError, QueueEmptyError):
        base = getattr(torch_names, cls.__name__, None)
        if base is not None and not issubclass(cls, base):
            cls.__bases__ = (cls.__bases__[0], base, *cls.__bases__[1:])


class CommError(DistBackendError):
    """Communication failed; the group is broken and must be made again."""


class CommTimeout(CommError, TimeoutError):
    """Ranks did not arrive within the group's timeout.

    Attributes:
        missing: The ranks that did not arrive.
        whereabouts: The last call and the current line of these ranks, by rank, if known.
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
    """A peer was killed, exited, or left the group.

    Attributes:
        peer: The peer's rank.
        pid: Its process id, if known.
        host: Its host, if known.
        exit: How its process ended, such as "signal 9 (SIGKILL)", if known.
    """

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
    """The ranks did not make the same call.

    Attributes:
        calls: The call of each rank, as text.
    """

    def __init__(self, what: str, *, calls: dict[int, str] | None = None, **fields: object) -> None:
        self.calls = calls or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class ReplicasDiffer(DureError, RuntimeError):
    """Ranks have different values of a parameter or batch that must be the same.

    Attributes:
        parameter: Name of the parameter, or of the entry of the batch.
        step: The step that the caller passed.
        ranks: Sets of global ranks with equal values, the largest first.
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
    """The group was destroyed or aborted while the operation was pending."""


class StoreError(DistStoreError):
    """An operation of the key-value store failed."""


class QueueEmptyError(StoreError):
    """`Store.queue_pop(key, block=False)` found nothing in the queue."""


class StoreTimeout(StoreError, TimeoutError):
    """Keys did not appear in time.

    Attributes:
        keys: The missing keys.
    """

    def __init__(self, what: str, *, keys: tuple[str, ...] = (), **fields: object) -> None:
        self.keys = keys
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class StoreLost(StoreError, DistNetworkError, ConnectionError):
    """The connection to the store broke, or its process ended; a new connection may work."""


class StoreRefused(StoreError, DistNetworkError, ConnectionError):
    """The server has another job key, or is not a store of Dure.

    Attributes:
        foreign: Whether the server does not use the store's protocol.
    """

    foreign = False


class RendezvousError(DistNetworkError):
    """The ranks could not find each other, or have conflicting ranks or world sizes."""


class RendezvousTimeout(RendezvousError, DistStoreError, TimeoutError):
    """Not all ranks arrived in time.

    Attributes:
        came: The ranks that arrived.
        missing: The ranks that did not.
    """

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
    """Some ranks ran out of inputs before the others, in a context that does not allow it.

    All ranks raise this error, and the group can still be used.

    Attributes:
        ranks: The ranks that ran out of inputs.
    """

    def __init__(self, what: str, *, ranks: tuple[int, ...] = (), **fields: object) -> None:
        self.ranks = ranks
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class PipelineError(DureError, RuntimeError):
    """A stage of a pipeline raised.

    All ranks raise this error at the end of the step, and the group can still be used.

    Attributes:
        peer: The rank of the pipeline whose stage raised.
        action: The action that failed, such as "1B0".
        stage: Its stage.
        microbatch: Its microbatch; -1 if it is not of a microbatch.
        remote_traceback: The traceback on that rank.
        others: Other stages that raised in the same step, as text.
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
        failures: By global rank, the first failure first: an object with torch's fields
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
        """Return the first failure.

        Returns:
            The rank that failed first, and its entry of `failures`.

        Raises:
            UsageError: No rank failed; the ranks could not be started, for example.
        """
        if not self.failures:
            raise UsageError("no rank failed", seen=f"the job failed: {self}")
        return next(iter(self.failures.items()))


class RpcError(DureError, RuntimeError):
    """A remote call failed.

    Attributes:
        remote_traceback: The traceback on the called worker.
    """

    def __init__(self, what: str, *, remote_traceback: str = "", **fields: object) -> None:
        self.remote_traceback = remote_traceback
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointError(DureError, RuntimeError):
    """A checkpoint cannot be written or used.

    Attributes:
        path: Path of the checkpoint.
    """

    def __init__(self, what: str, *, path: str = "", **fields: object) -> None:
        self.path = path
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointDamaged(CheckpointError):
    """A checkpoint, or every checkpoint of a run, is damaged.

    A checkpoint that could not be read (too many open files, an I/O error) may be intact; the error
    is then a plain `CheckpointError`.

    Attributes:
        refused: Paths of the damaged checkpoints, and the reasons.
    """

    def __init__(
        self, what: str, *, refused: dict[str, str] | None = None, **fields: object
    ) -> None:
        self.refused = refused or {}
        super().__init__(what, **fields)  # pyright: ignore[reportArgumentType]


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is intact, but does not match the objects to load."""


class CheckpointNotWritten(CheckpointError):
    """The save failed on all ranks, and earlier checkpoints are unchanged.

    If only the last flush failed, the message says that the new checkpoint is in place.

    Attributes:
        rank: The rank that failed.
    """


class CheckpointTooNew(CheckpointError):
    """The checkpoint has a newer format than this release reads. It may be intact."""


class CheckpointException(CheckpointError):
    """A sharded save or load failed on some ranks; raised on all ranks. torch's name.

    Args:
        what: The failure in a few words.
        failures: For each failed rank, its exception and the stack where it was raised.
    """

    def __init__(
        self,
        what: str,
        failures: dict[int, tuple[BaseException, StackSummary]] | None = None,
        **fields: object,
    ) -> None:
        self.failures = failures or {}
        seen = [f"rank {rank}: {e}" for rank, (e, _) in sorted(self.failures.items())]
        super().__init__(what, **({"seen": "; ".join(seen)} | fields))  # pyright: ignore


class InternalError(DureError, RuntimeError):
    """A bug of Dure; please report it."""


class DureWarning(Warning):
    """The base class of all warnings of Dure."""


class DureDeprecationWarning(DureWarning, FutureWarning):
    """The argument, the form or the class has a successor, which the message names.

    It is a `FutureWarning`, as in torch: Python hides a `DeprecationWarning` by default.
    """


def warn_deprecated(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that a name, an argument or a form has a successor.

    Args:
        old: The deprecated name or form.
        new: The successor, and the differences if there are any.
        stacklevel: As for `warnings.warn`, relative to the caller; 2 is the caller's caller.
    """
    text = f"{old} is deprecated: use {new}"
    warnings.warn(text, DureDeprecationWarning, stacklevel=stacklevel + 1)


class UsageWarning(DureWarning, UserWarning):
    """The call is valid, but probably a mistake."""


class PerformanceWarning(DureWarning, UserWarning):
    """The result is correct, but the program is slower than necessary."""


class UnwaitedWorkWarning(DureWarning, RuntimeWarning):
    """The `Work` of an asynchronous operation was dropped without a call of `wait`."""


class ForkWarning(DureWarning, RuntimeWarning):
    """This process forks while it has more results in shared memory than a fork copies."""
