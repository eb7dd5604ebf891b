"""All ranks, or none: a failure of one rank fails on every rank, with the same error.

Each rank does its part and then reports its outcome to rank 0, which reports to all what they must
know. Without that exchange a rank whose disk is full would raise and leave, and the others would
wait for it, or worse continue and rely on a checkpoint that does not exist. A rank that dies in the
meantime is the group's matter (`PeerLost`).

Cost of an exchange: two messages to rank 0 and two from it. Their bytes are what a rank reports,
and what it must know (`Ranks.decided`). Only rank 0 receives what all ranks report.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from dure.comm.call import NOTHING, about, subject_of
from dure.comm.objects import broadcast_object_list, gather_object, scatter_object_list
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

    def decided(
        self,
        what: str,
        do: Callable[[], T],
        decide: Callable[[list[T]], Any] = lambda results: None,
        apart: bool = False,
    ) -> Any:
        """Call `do` on every rank, and `decide` with their results on rank 0; return what it did.

        Args:
            what: The text of the error.
            do: This rank's part.
            decide: The part of rank 0 alone.
            apart: Whether `decide` returns a list, of which each rank gets its item.

        Raises:
            CheckpointException: `what`, with the exceptions of all ranks that failed.

        Collective:
            All ranks must call.
        """
        mine = _outcome(do)
        outcomes = failures = cause = answer = None
        try:
            outcomes = self._gathered(mine)
            failures: dict[int, Any] | None = {}
            if outcomes is not None:
                failures = {r: (e, at) for r, (_, e, at) in enumerate(outcomes) if e is not None}
                if not failures:
                    results = [result for result, _, _ in outcomes]
                    answer, *failure = _outcome(lambda: decide(results))
                    if failure[0] is not None:
                        failures = {0: tuple(failure)}
            failures, answer = self._spread(failures, answer, apart)
            if failures:
                if mine[1] is not None:
                    failures[self.rank] = mine[1:]
                cause = failures.get(self.rank, next(iter(failures.values())))[0]
                raise CheckpointException(what, failures) from cause
            return answer
        finally:
            about(NOTHING)
            # An exception refers to the frame that caught it, and to its callers. If one of them
            # refers to the exception, objects of the program, and a Checkpointer with its lock, are
            # not freed before the garbage is collected.
            del mine, outcomes, failures, cause, answer

    @property
    def _are_many(self) -> bool:
        return self.group is not None and self.size > 1 and self.group.backend_name != "fake"

    def _gathered(self, mine: Any) -> list[Any] | None:
        """Return the outcomes of all ranks, on rank 0; in a dry run, all are this rank's."""
        if not self._are_many:
            return [mine] * self.size
        about(_subject(f"checkpoint.{self._op}, which all ranks must call"))
        outcomes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        gather_object(mine, outcomes, group=self.group, group_dst=0)
        if outcomes is not None:
            outcomes[0] = mine
        return outcomes

    def _spread(self, failures: Any, answer: Any, apart: bool) -> tuple[Any, Any]:
        """Return what rank 0 knows of failures, and its answer, or this rank's item of it."""
        own = answer[self.rank] if apart and not failures and answer is not None else answer
        if not self._are_many:
            return failures, own
        received: list[Any] = [(failures, own)]
        if apart:
            items: list[Any] | None = None
            if self.rank == 0:
                items = [(failures, None if failures else item) for item in answer or self._none]
            scatter_object_list(received, items, group=self.group, group_src=0)
        else:
            broadcast_object_list(received, group=self.group, group_src=0)
        return (failures, own) if self.rank == 0 else received[0]

    @property
    def _none(self) -> list[None]:
        return [None] * self.size

    def each(self, do: Callable[[], object]) -> None:
        """Call `do` on every rank.

        Raises:
            Exception: The lowest failing rank's, on all ranks; its own keeps its traceback.

        Collective:
            All ranks must call.
        """
        self._raised_alone(do, lambda _: None)

    def _raised_alone(self, do: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        try:
            return self.decided("", do, decide)
        except CheckpointException as e:
            error = self.lowest(e)
        try:  # outside the handler: `e` refers to it, and would be its context
            raise error from error.__cause__
        finally:
            del error  # see `decided`

    def lowest(self, failed: CheckpointException) -> BaseException:
        """Return the exception of the lowest rank that failed, for all ranks to raise."""
        rank, (error, _) = min(failed.failures.items())
        error.add_note(f"on rank {rank} of {self.size}")
        return error

    def all_or_none(self, what: str, do: Callable[[], T]) -> list[T]:
        """Call `do` on every rank, and return all ranks' results.

        Raises:
            CheckpointException: `what`, with the exceptions of all ranks that failed.

        Collective:
            All ranks must call.

        Cost:
            Each rank receives what all report; see `decided`.
        """
        mine: list[T] = []

        def kept() -> T:
            mine.append(do())
            return mine[0]

        found: list[T] = self.decided(what, kept, lambda results: results)
        found[self.rank] = mine[0]  # not a copy of it, which the program would not see change
        return found

    def first_or_none(self, what: str, do: Callable[[], T]) -> T:
        """Call `do` on rank 0 alone, and return its result on all ranks.

        Raises:
            CheckpointException: `what`, with the exception of rank 0.

        Collective:
            All ranks must call.
        """
        return self.decided(what, lambda: None, lambda _: do())

    def first(self, do: Callable[[], T]) -> T:
        """Call `do` on rank 0 alone, and return its result on all; errors as `each`."""
        return self._raised_alone(lambda: None, lambda _: do())


def _outcome(do: Callable[[], T]) -> tuple[T | None, Exception | None, Any]:
    """Call `do`; return its result, or its exception and where it was raised."""
    try:
        return do(), None, None
    except Exception as e:
        if isinstance(e, DureError | OSError) and _can_be_received(e):
            return None, e, traceback.extract_tb(e.__traceback__)
        error = CheckpointError("an object failed", seen=f"{type(e).__name__}: {e}")
        error.__cause__ = e
        try:
            return None, error, traceback.extract_tb(e.__traceback__)
        finally:
            del error


def _can_be_received(error: BaseException) -> bool:
    """Return whether another rank can make the exception again, which some classes prevent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of many classes
        return False
    return True
