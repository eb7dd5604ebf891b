"""Communication hooks: how they are called, and how all ranks learn that one of them failed.

A hook replaces the averaging all_reduce of each bucket. It is called when its bucket is complete,
in the order of the buckets, and starts collectives; callbacks that it adds with `then` run at the
end of backward, again in the order of the buckets (see comm/futures.py). Callbacks may therefore
start collectives themselves: all ranks start them in the same order.

A hook is the user's code, and may fail on one rank alone, while the others wait in the collective
that this rank will not start. So the used-parameter bitmap (outcome.py), which without a hook rides
along with the last bucket, is reduced on its own here, after all that the hook does. A rank whose
hook failed starts it at once. If the others are there too, because the failure came after the
hook's collectives, all raise `HookError`. If they are in a collective of the hook, the engine sees
that the ranks call different things, and all raise: the failed rank its own error, the others a
`Desync` with a note.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_origin

import torch

from dure.comm.futures import Later, driven
from dure.errors import CommError, Desync, HookError
from dure.parallel.ddp.buckets import GradBucket

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.ops import ReduceOp
    from dure.parallel.ddp.buckets import Bucket
    from dure.parallel.ddp.outcome import UsedParameters

__all__ = ["CommHook", "HookRunner", "check_hook", "name_of"]

CommHook = Callable[[Any, GradBucket], torch.futures.Future[Any]]
"""Any: the hook's own state, and what its future holds (a tensor, or a list of one)."""

_Future: type = torch.futures.Future.__mro__[1]
"""What `then` returns is an instance of the class in C++, and not of the one in Python."""

_SIGNATURE = "hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]"


def name_of(hook: object) -> str:
    """Return a hook's name; for `functools.partial` that of its function."""
    return getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__)


def check_hook(hook: object) -> None:
    """Verify that `hook` can be called as DDP calls it, as far as its signature shows.

    Raises:
        HookError: It cannot be called, takes other arguments, or its annotations say that it wants
            something else than a bucket or returns something else than a future.
    """
    if not callable(hook):
        raise HookError(
            "Communication hook must be callable",
            seen=f"a {type(hook).__name__}",
            fix="The state comes first: register_comm_hook(state, hook).",
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # written in C, say: nothing is known
    try:
        bound = signature.bind(None, None)
    except TypeError as error:
        raise HookError(
            "Communication hook: it must take two arguments, the state and the bucket",
            seen=f"{name_of(hook)}{signature}: {error}",
            fix=f"Write {_SIGNATURE}.",
        ) from None
    second = signature.parameters[list(bound.arguments)[-1]]
    annotation = second.annotation
    if second.kind is not second.VAR_POSITIONAL and not _names(annotation, "GradBucket"):
        raise HookError(
            "Communication hook: bucket annotation should be dist.GradBucket.",
            seen=f"{name_of(hook)} has {annotation!r}",
        )
    returned = signature.return_annotation
    if not (_names(returned, "Future") or _names(get_origin(returned), "Future")):
        raise HookError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            seen=f"{name_of(hook)} has {returned!r}",
        )


def _names(annotation: object, wanted: str) -> bool:
    """Tell whether an annotation is missing, Any, or names the class `wanted`, ours or torch's."""
    if annotation is inspect.Parameter.empty or annotation is Any or annotation is object:
        return True
    if isinstance(annotation, str):  # from __future__ import annotations
        return wanted in annotation or annotation in ("Any", "object")
    return getattr(annotation, "__name__", "") in (wanted, "Later")


class HookRunner:
    """Runs a communication hook for the buckets of one reducer.

    Threads:
        As the reducer's; its lock is held.

    Attributes:
        state: The hook's first argument.
        hook: The hook.
        name: Its name in reports.
    """

    def __init__(self, group: ProcessGroup, state: object, hook: CommHook, name: str) -> None:
        self._group = group
        self.state, self.hook, self.name = state, hook, name
        self._error: HookError | CommError | None = None
        self._futures: list[Later] = []

    def start(self, bucket: Bucket, last: bool) -> None:
        """Call the hook for `bucket`; an error of it is kept for the end."""
        if self._error is not None:
            return
        try:
            with driven() as made:
                result: object = self.hook(self.state, GradBucket(bucket, last, self._group))
            self._futures += made
            if not isinstance(result, _Future):
                raise self._wrong(
                    bucket, "returned no future", type(result).__name__, f"Write {_SIGNATURE}."
                )
            bucket.result = result  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            self._keep(error, bucket)

    def finish(
        self, buckets: Sequence[Bucket], used_parameters: UsedParameters, op: ReduceOp
    ) -> None:
        """Wait for all results, then reduce the bitmap; an error of the hook is entered there.

        Collective:
            All ranks of the group, at the end of a backward.

        Raises:
            HookError: The hook failed here, and the other ranks are not where it left them.
            CommError: A collective failed, which can be because a hook failed elsewhere.
        """
        futures, self._futures = self._futures, []
        try:
            self._drive(futures)
            with driven():
                for bucket in buckets:
                    self._settle(bucket)
            if self._error is not None:
                used_parameters.add_error()
            self._group.all_reduce(used_parameters.flags, op)
        except CommError as error:
            mine = self.take_error()
            if isinstance(mine, CommError):
                raise mine from error
            if mine is not None:
                mine.add_note(f"The other ranks were not at the end of their step: {error}")
                raise mine from mine.__cause__
            if isinstance(error, Desync):
                error.add_note(
                    f"The hook {self.name} failed on a rank that is at the end of its step, or "
                    f"started other collectives there than here."
                )
            raise

    def take_error(self) -> HookError | CommError | None:
        """Return the hook's error in this backward, and forget it."""
        error, self._error = self._error, None
        return error

    def _drive(self, futures: Sequence[Later]) -> None:
        """Run what was chained to the hook's collectives, and to those that this starts."""
        while futures and self._error is None:
            with driven() as more:
                for future in futures:
                    future.drive()
            futures = more

    def _settle(self, bucket: Bucket) -> None:
        """Wait for one bucket's result and put it in place."""
        if self._error is not None or bucket.result is None:
            return
        try:
            value: Any = bucket.result.wait()
            self._place(bucket, value)
        except CommError:
            raise
        except Exception as error:
            self._keep(error, bucket)

    def _place(self, bucket: Bucket, value: Any) -> None:
        """Copy the hook's result to the bucket, if it is elsewhere."""
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        sparse, buffer = bucket.sparse, bucket.buffer
        wanted = buffer if sparse is None else sparse.tensor
        if not isinstance(value, torch.Tensor) or value.is_sparse != wanted.is_sparse:
            raise self._wrong(bucket, "gave no tensor like the bucket's", _described(value))
        if value.numel() != wanted.numel():
            raise self._wrong(
                bucket,
                "gave another shape than the bucket's",
                f"{_described(value)} for {_described(wanted)}",
            )
        if value.dtype != wanted.dtype and not (
            value.is_floating_point() and wanted.is_floating_point()
        ):
            raise self._wrong(
                bucket, "gave a dtype that is no gradient's", f"{value.dtype} for {wanted.dtype}"
            )
        if sparse is not None:
            sparse.tensor = value.detach()
            return
        there = value.data_ptr() == buffer.data_ptr() and value.dtype == buffer.dtype
        if not there or not value.is_contiguous():
            with torch.no_grad():
                buffer.copy_(value.detach().reshape(-1))

    def _keep(self, error: Exception, bucket: Bucket) -> None:
        """Keep the first error for the end; a hook's own gets the hook's name.

        An error of communication is passed on unchanged, because a program that rebuilds the group
        catches it.
        """
        if isinstance(error, HookError | CommError):
            self._error = error
            return
        self._error = self._wrong(bucket, "raised", f"{type(error).__name__}: {error}")
        self._error.__cause__ = error

    def _wrong(self, bucket: Bucket, what: str, seen: str, fix: str = "") -> HookError:
        return HookError(
            f"the communication hook {self.name} {what}, in bucket {bucket.index}",
            parameters=tuple(view.name for view in bucket.views),
            rank=self._group.rank(),
            world_size=self._group.size(),
            group=self._group.group_name,
            seen=seen,
            fix=fix,
        )


def _described(value: object) -> str:
    """Return what a hook gave, for an error."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{'sparse ' if value.is_sparse else ''}{value.dtype} {list(value.shape)}"
