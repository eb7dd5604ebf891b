"""All ranks, or none: a failure of one rank fails on every rank, with the same error.

Each rank does its part and then reports its outcome to the others. Without that exchange a rank
whose disk is full would raise and leave, and the others would wait for it, or worse continue and
rely on a checkpoint that does not exist. A rank that dies in the meantime is the group's matter
(`PeerLost`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from dure.comm.call import NOTHING, about, subject_of
from dure.comm.objects import all_gather_object
from dure.comm.world import current_world, resolve
from dure.errors import CheckpointError, CheckpointException, DureError, UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Ranks"]

T = TypeVar("T")
_subject = cache(subject_of)


class Ranks:
    """The ranks that save and load together: a group, or this process alone where there is none.

    Args:
        group: The ranks; None: the default group.
        op: The function of `dure.checkpoint` that they call, for messages.
        alone: Only this process, even if there is a group.
    """

    def __init__(
        self, group: ProcessGroup | None, op: str = "Checkpointer", alone: bool = False
    ) -> None:
        named = not alone and (group is not None or current_world().default is not None)
        self.group = resolve(group, op) if named else None
        self._op = op
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()

    @property
    def global_ranks(self) -> frozenset[int]:
        """Global ranks of the group; without a group, {0}: this process."""
        return frozenset((0,) if self.group is None else self.group.global_ranks)

    @property
    def num_threads(self) -> int:
        """Threads that a rank may copy with: its share of the cores, as if all were on one host."""
        linux = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        return min(8, max(1, cores // self.size))

    def require_others(self) -> None:
        """Raise if the other ranks do not exist, so that their parts cannot be written.

        Raises:
            UsageError: The group's backend is `fake`.
        """
        if self.group is not None and self.size > 1 and self.group.backend_name == "fake":
            raise UsageError(
                "a checkpoint cannot be saved with the backend 'fake'",
                op=f"checkpoint.{self._op}",
                seen=f"{self.size - 1} of the {self.size} ranks do not exist and cannot write "
                "their parts",
                fix="Do not save in a dry run.",
            )

    def _outcomes(self, do: Callable[[], T]) -> list[Any]:
        """Call `do` on every rank; return its result, or its exception, of all of them."""
        mine: tuple[T | None, Exception | None, traceback.StackSummary | None]
        try:
            mine = do(), None, None
        except (DureError, OSError) as e:
            mine = None, e, traceback.extract_tb(e.__traceback__)
        except Exception as e:  # of a class that the other ranks may not be able to receive
            error = CheckpointError("an object failed", seen=f"{type(e).__name__}: {e}")
            error.__cause__ = e
            mine = None, error, traceback.extract_tb(e.__traceback__)
            del error
        outcomes: list[Any] = [mine]
        try:
            if self.group is not None and self.size > 1:
                outcomes = [None] * self.size
                about(_subject(f"checkpoint.{self._op}, which all ranks must call"))
                all_gather_object(outcomes, mine, self.group)
                outcomes[self.rank] = mine
            return outcomes
        finally:
            about(NOTHING)
            # An exception refers to the frame that caught it, and to its callers. If one of them
            # refers to the exception, objects of the program, and a Checkpointer with its lock, are
            # not freed before the garbage is collected.
            del mine, outcomes

    def each(self, do: Callable[[], T]) -> list[T]:
        """Call `do` on every rank, and return all ranks' results.

        Raises:
            Exception: The lowest failing rank's, on all ranks; its own keeps its traceback.

        Collective: all ranks must call.
        """
        try:
            return self.all_or_none("", do)
        except CheckpointException as e:
            error = self.lowest(e)
        try:  # outside the handler: `e` refers to it, and would be its context
            raise error from error.__cause__
        finally:
            del error  # see `_outcomes`

    def lowest(self, failed: CheckpointException) -> BaseException:
        """Return the exception of the lowest rank that failed, for all ranks to raise."""
        rank, (error, _) = min(failed.failures.items())
        error.add_note(f"on rank {rank} of {self.size}")
        return error

    def all_or_none(self, what: str, do: Callable[[], T]) -> list[T]:
        """Call `do` on every rank, and return all ranks' results.

        Raises:
            CheckpointException: `what`, with the exceptions of all ranks that failed.

        Collective: all ranks must call.
        """
        outcomes = self._outcomes(do)
        failures = {r: (e, where) for r, (_, e, where) in enumerate(outcomes) if e is not None}
        try:
            if failures:
                cause = failures.get(self.rank, next(iter(failures.values())))[0]
                raise CheckpointException(what, failures) from cause
            return [result for result, _, _ in outcomes]
        finally:
            outcomes = failures = cause = None  # see `_outcomes`

    def first(self, do: Callable[[], T]) -> T:
        """Call `do` on rank 0 alone, and return its result on all; errors as `each`."""
        return self.each(lambda: do() if self.rank == 0 else None)[0]  # pyright: ignore[reportReturnType]
