"""`Join`: training continues when some ranks have run out of inputs (torch's interface).

A rank whose inputs have ended leaves its loop and would be missing in the next collective. Inside a
`Join` it waits at the end of the block, and *shadows* the others: it calls the collectives that
they call, with nothing to add, until all ranks have reached the end.

How does it know what to call? Objects that communicate in a loop are *joinables* (DDP, the sharded
optimizer, the forwards in `fsdp.follow`). Before it communicates, a joinable *announces* what it is
about to do, and the ranks at the end of the block *listen*. Both are the same small all_reduce, in
which each rank has one number:

    0                          this rank has run out of inputs
    1 + 65536 * place + phase  it is about to do `phase` of the joinable at `place` in the context
    -1                         it left the block with an error
    -2                         it has run out of inputs, and cannot shadow the others

No rank writes another's number, so the sum shows every rank what all the others do next. A listener
then calls the joinable's *hook* for that phase, and listens again. When no rank announces anything,
all have joined, and the post-hooks make the ranks equal.

A joinable announces each phase when it is certain, so a listener never guesses: forwards without a
backward, accumulation without synchronization and optimizers that step at every k-th iteration are
followed as they come. (torch announces a complete iteration at its first forward.)
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.errors import (
    CommError,
    Desync,
    DureError,
    PeerLost,
    PerformanceWarning,
    UnevenInputs,
    UsageError,
)

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Join", "JoinConfig", "JoinHook", "JoinRound", "JoinSlot", "Joinable"]

_JOINED, _FAILED, _UNABLE = 0, -1, -2
_PHASES = 1 << 16
_MANY_ROUNDS = 1000


class JoinHook:
    """What a joinable does on a rank that has run out of inputs; override what is needed.

    Attributes:
        preparation: How a rank becomes able to shadow, for the error if `can_shadow` is False.
        warns_of_many_rounds: Whether a rank that shadows 1,000 times gets a `PerformanceWarning`:
            it has fewer inputs, and would be idle less if they were divided more evenly.

    Example:
        ```python
        class Counted(dist.JoinHook):  # of the joinable below
            def main_hook(self):  # for each step of the others
                dist.all_reduce(torch.zeros(1))
        ```
    """

    preparation = ""
    warns_of_many_rounds = True

    def can_shadow(self) -> bool:
        """Return whether this rank can shadow; if not, an announcement is an error on all ranks."""
        return True

    def enter(self, context: Join) -> None:
        """Get ready for `context`, which begins; may refuse it, on all ranks."""

    def main_hook(self) -> None:
        """Shadow the collectives of one announced iteration of the joinable."""

    def shadow(self, phase: int, round: JoinRound) -> None:
        """Shadow an announced phase; by default `main_hook`, for any phase.

        Args:
            phase: The number that the joinable announced (0 unless it said otherwise).
            round: The ranks that announced it.
        """
        self.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make the ranks equal, once all have run out of inputs; called on every rank.

        Args:
            is_last_joiner: Whether this rank is one of those that had inputs the longest.
        """


class JoinConfig(NamedTuple):
    """What torch keeps on a joinable."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """Something that communicates in a training loop and can take part in a `Join`.

    Before it communicates it calls ``Join.notify_join_context(self)``.

    Attributes:
        join_slot: Its place in the context that it is in; None outside. Set by `Join`.

    Example:
        ```python
        class Counter(dist.Joinable):
            def count(self):
                dist.Join.notify_join_context(self)
                total = torch.ones(1)
                dist.all_reduce(total)
                return int(total)

            def join_hook(self, **kwargs):
                return Counted()

            @property
            def join_device(self):
                return torch.device("cpu")

            @property
            def join_process_group(self):
                return dist.group.WORLD

        counter = Counter()
        with dist.Join([counter]):
            counts = [counter.count() for _ in range(1 + dist.get_rank())]
        assert counts == [2, 1][: len(counts)]  # rank 1 is alone in its second step
        ```
    """

    join_slot: JoinSlot | None = None

    def __init__(self) -> None:
        super().__init__()

    @property
    def _join_config(self) -> JoinConfig:
        """The context's settings, under the name that programs read of torch's."""
        slot = self.join_slot
        if slot is None:
            return JoinConfig()
        return JoinConfig(True, slot.context.throw_on_early_termination, slot.place == 0)

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context.

        Args:
            **kwargs: Arguments that the user gave to `Join` beyond its own; the same for all
                joinables of the context.
        """

    def describe_phase(self, phase: int) -> str:
        """Return what the joinable does in a phase, for errors."""
        return f"phase {phase} of {type(self).__name__}"

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device from which announcements are sent."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The ranks that take part; the same for all joinables of a context."""


@dataclass(frozen=True, slots=True)
class JoinRound:
    """What all ranks announced at one moment.

    Attributes:
        codes: Each rank's number; see the module's text.
    """

    codes: tuple[int, ...]

    @property
    def active(self) -> tuple[int, ...]:
        """Group ranks that have inputs, in order."""
        return tuple(r for r, code in enumerate(self.codes) if code > _JOINED)

    @property
    def joined(self) -> tuple[int, ...]:
        """Group ranks that have run out of inputs, in order."""
        return tuple(r for r, code in enumerate(self.codes) if code in (_JOINED, _UNABLE))

    def wait(self) -> bool:
        """Return True: the announcement has been made (torch's returns a work to wait for)."""
        return True


@dataclass(frozen=True, slots=True)
class JoinSlot:
    """A joinable's place in the context that it is in.

    Attributes:
        context: The context.
        place: The joinable's number in it.
    """

    context: Join
    place: int


class Join:
    """Context in which ranks may have different numbers of inputs.

        with Join([ddp, optimizer]):
            for batch in batches:  # their number may differ from rank to rank, and be 0
                loss_of(ddp(batch)).backward()
                optimizer.step()

    Collectives that are not those of a joinable must not be called in the block.

    Args:
        joinables: The communicating objects of the block; all on the same process group, on every
            rank in the same order.
        enable: False makes the context do nothing: for inputs that are known to be even.
        throw_on_early_termination: Raise `UnevenInputs` on all ranks as soon as one has run out of
            inputs, in place of shadowing.
        **kwargs: Handed to every joinable's `join_hook`, such as DDP's
            `divide_by_initial_world_size`.

    Raises:
        UsageError: No joinables, joinables of different groups, or one that is in another context.
        UnevenInputs: See `throw_on_early_termination`; `ranks` says who ran out.
        PeerLost: Another rank left the block with an error; raised where this one next announces.
        Desync: The ranks announced different things.

    Collective:
        Leaving the block without an error, and each announcement, on all ranks.

    Cost:
        One all_reduce of 4 n bytes for each announcement.

    Threads:
        Announcements of a rank come one at a time, from any thread.

    Attributes:
        group: The ranks that take part.
        throw_on_early_termination: As given.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        batches = [torch.ones(1, 2)] * (1 + dist.get_rank())  # 1 on rank 0, 2 on rank 1
        with dist.Join([model]):
            for batch in batches:
                model(batch).sum().backward()
        ```
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        self._enable = enable
        self.throw_on_early_termination = throw_on_early_termination
        self.group, self._device = _common_place(self._joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._ended = False
        self._last: JoinRound | None = None
        self._known: Exception | None = None  # raised on all ranks

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        taken = [j for j in self._joinables if j.join_slot is not None]
        if taken:
            raise UsageError(
                f"a {type(taken[0]).__name__} is in a Join context already",
                fix="Give all joinables to one Join; contexts cannot be nested.",
            )
        for hook in self._hooks:
            hook.enter(self)
        for place, joinable in enumerate(self._joinables):
            joinable.join_slot = JoinSlot(self, place)
        self._ended = False
        self._last = None
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        self._ended = True
        try:
            if value is None:
                self._shadow_others()
        except Exception as error:
            value = error
            raise
        finally:
            for joinable in self._joinables:
                joinable.join_slot = None
            if value is not None:
                self._report_failure(value)

    @staticmethod
    def notify_join_context(joinable: Joinable, phase: int = 0) -> JoinRound | None:
        """Announce that `joinable` is about to communicate.

        Args:
            joinable: The object that is about to communicate.
            phase: The number of its next phase, if it has different ones (0 to 65,535); passed to
                its hook's `shadow`.

        Returns:
            What all ranks announced; None where `joinable` is in no context, and on a rank that
            shadows.
        """
        slot = joinable.join_slot
        if slot is None or slot.context._ended:
            return None
        return slot.context._announce(1 + _PHASES * slot.place + phase)

    # ---------------------------------------------------------------- rounds

    def _announce(self, code: int) -> JoinRound:
        """Say what this rank is about to do, and return what all ranks are."""
        round = self._exchange(code)
        if self.throw_on_early_termination and round.joined:
            raise self._uneven(round)
        return round

    def _exchange(self, code: int) -> JoinRound:
        numbers = self._numbers(code)
        self.group.all_reduce(numbers)
        round = JoinRound(tuple(numbers.tolist()))
        codes = set(round.codes)
        announced = codes - {_JOINED, _UNABLE}
        if _FAILED in codes or len(announced) > 1 or (announced and _UNABLE in codes):
            self._known = self._error_of(round)
            raise self._known
        if announced:
            self._last = round
        return round

    def _numbers(self, code: int) -> torch.Tensor:
        """Return this rank's part of the sum: `code` in its own place."""
        numbers = [0] * self.group.size()
        numbers[self.group.rank()] = code
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    @property
    def last_joiners(self) -> tuple[int, ...]:
        """Group ranks that had inputs when any rank last had; the same on all ranks.

        If no rank had any input, all of them.
        """
        return self._last.active if self._last else tuple(range(self.group.size()))

    def _shadow_others(self) -> None:
        """Shadow until all ranks are here; then make the ranks equal."""
        num_rounds = 0
        code = _JOINED if all(hook.can_shadow() for hook in self._hooks) else _UNABLE
        while (round := self._exchange(code)).active:
            if self.throw_on_early_termination:
                raise self._uneven(round)
            place, phase = divmod(round.codes[round.active[0]] - 1, _PHASES)
            self._hooks[place].shadow(phase, round)
            num_rounds += 1
            warns = any(hook.warns_of_many_rounds for hook in self._hooks)
            if num_rounds == _MANY_ROUNDS and warns:
                warnings.warn(
                    f"rank {self.group.rank()} has shadowed the others {num_rounds} times: it has "
                    "that many fewer inputs, and was idle then; divide the data more evenly",
                    PerformanceWarning,
                    stacklevel=3,
                )
        for hook in self._hooks:
            hook.post_hook(self.group.rank() in self.last_joiners)

    def _report_failure(self, error: BaseException) -> None:
        """Report to the others that this rank has left; do not wait until they know.

        Errors of communication, and those of the context, are raised on all ranks.
        """
        is_known = error is self._known or isinstance(error, CommError | UnevenInputs)
        if is_known or not isinstance(error, Exception):
            return
        with suppress(DureError):
            work = self.group.all_reduce(self._numbers(_FAILED), async_op=True)
            if work is not None:
                work.disown()  # it is not waited for: the error is already raised

    # ---------------------------------------------------------------- errors

    def _error_of(self, round: JoinRound) -> CommError | UsageError:
        """Make the error of a round that the ranks cannot continue after."""
        if _FAILED in round.codes:
            peer = round.codes.index(_FAILED)
            return PeerLost(
                f"rank {peer} left the Join context with an error",
                peer=peer,
                exit="raised an error",
                seen="see that rank's error",
                **self._where(),
            )
        calls = {r: self._describe(code) for r, code in enumerate(round.codes)}
        seen = "; ".join(f"rank {r}: {text}" for r, text in calls.items())
        if _UNABLE in round.codes:
            return UsageError(
                "a rank that has run out of inputs cannot follow the others",
                seen=seen,
                fix=" ".join(hook.preparation for hook in self._hooks if hook.preparation),
            )
        return Desync(
            "the ranks announced different things to the Join context",
            calls=calls,
            seen=seen,
            fix="Call the joinables in the same order on all ranks that have inputs.",
            **self._where(),
        )

    def _describe(self, code: int) -> str:
        if code == _JOINED:
            return "has run out of inputs"
        if code == _UNABLE:
            return "has run out of inputs, and cannot follow"
        place, phase = divmod(code - 1, _PHASES)
        return self._joinables[place].describe_phase(phase)

    def _uneven(self, round: JoinRound) -> UnevenInputs:
        ranks = ", ".join(map(str, round.joined))
        me = self.group.rank()
        what = "Detected at least one rank that exhausted inputs"  # torch's words, both
        return UnevenInputs(
            f"Rank {me} exhausted all inputs" if me in round.joined else what,
            ranks=round.joined,
            seen=f"rank{'s' if len(round.joined) > 1 else ''} {ranks} ran out, "
            f"{len(round.active)} of {self.group.size()} ranks had more",
            fix="Stop here on all ranks, or leave out throw_on_early_termination to continue.",
            **self._where(),
        )

    def _where(self) -> dict[str, Any]:
        """Fields of errors."""
        return {
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "group": self.group.group_name,
        }


def _common_place(joinables: Sequence[Joinable]) -> tuple[ProcessGroup, torch.device]:
    """Return the group that all joinables share, and the first one's device."""
    if not joinables:
        raise UsageError("Join needs at least one joinable", fix="Pass [ddp], for example.")
    alien = next((j for j in joinables if not hasattr(j, "join_process_group")), None)
    if alien is not None:
        raise UsageError(
            f"Join cannot handle a {type(alien).__name__}",
            fix="For an optimizer of torch's write `with ddp.join(optimizer=optimizer):`.",
        )
    group = joinables[0].join_process_group
    for joinable in joinables[1:]:
        other = joinable.join_process_group
        if other is not group:
            raise UsageError(
                "the joinables of a Join context must be on one process group",
                seen=f"{type(joinables[0]).__name__} is on {group.group_name!r}, "
                f"{type(joinable).__name__} on {other.group_name!r}",
            )
    return group, joinables[0].join_device
