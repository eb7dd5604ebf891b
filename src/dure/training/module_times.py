"""What a step waits for, module by module, where parameters are gathered and gradients reduced.

    forward                       backward                          wait for gradients
    |--[a]----[b]----[c]----------|----[c]----[b]----[a]------------|-----|
       |-- b, ahead --|                       |------ reduce c ---------|

Measured on the host's clock, around what communicates. Of a module: how long its gather ran
*ahead*, while something else computed; how long it was then waited for; and how long reducing its
gradients was started or waited for. The sum of waits is the step's exposed communication.

If there are listeners, phases, gathers, reductions and waits are emitted as spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.trace import spans

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["ModuleClock", "ModuleTimes", "ShardedStepTimes", "emit_phases"]

now = time.monotonic_ns
_NS = 1e9


@dataclass(slots=True)
class ModuleTimes:
    """What one module's communication took in a step, in seconds.

    Attributes:
        ahead_s: Its gathers ran while something else computed.
        unshard_s: Starting its gathers, and waiting for them.
        reduce_s: Starting to reduce its gradients, and waiting for that.
    """

    ahead_s: float = 0.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStepTimes:
    """Times of one backward, and of the forwards before it.

    Attributes:
        exposed_comm_s: The part in which this rank only started or waited for communication.
        exposed_forward_s: The part of it before backward.
        turns_s: The part of it spent waiting for the other ranks to begin or end a step.
        step: Number of the backward, from 1; 0 before the first.
        num_bytes: Reduced bytes: this rank's unsharded gradients.
        modules: By the path of the module.
    """

    exposed_comm_s: float = 0.0
    exposed_forward_s: float = 0.0
    turns_s: float = 0.0
    step: int = 0
    num_bytes: int = 0
    modules: Mapping[str, ModuleTimes] = field(default_factory=dict[str, ModuleTimes])


class ModuleClock:
    """Stamps of the current step. Forwards without gradients are not measured.

    Attributes:
        times: Of the last backward that has ended.
    """

    def __init__(self) -> None:
        self.times = ShardedStepTimes()
        self._counts = False
        self._clear()

    def _clear(self) -> None:
        self._forward = self._backward = self._last = 0
        self._exposed = self._exposed_forward = self._turns = self._num_bytes = 0
        self._modules: dict[str, ModuleTimes] = {}
        self._begun: dict[str, _Begun] = {}
        self._spans: list[spans.Span] = []

    def begin_forward(self) -> None:
        """Note that the outermost module's forward begins."""
        self._counts = torch.is_grad_enabled()
        if self._counts and not self._forward:
            self._forward = now()

    def begin_backward(self) -> None:
        """Note that the first gradient is ready."""
        self._counts, self._backward = True, now()
        self._exposed_forward = self._exposed

    def last_wait(self) -> None:
        """Note that backward has nothing left to compute."""
        self._last = now()

    def waited_for_ranks(self, begin: int) -> None:
        """Note that other ranks were waited for, from `begin` until now."""
        if self._counts:
            self._turns += self._spent(begin)
            self._waited("other ranks", begin)

    def gather_started(self, module: str, begin: int, group: ProcessGroup | None) -> None:
        """Note that a gather was asked for, from `begin` until now; it was begun in `group`."""
        if self._counts:
            self._of(module).unshard_s += self._spent(begin) / _NS
            if group is not None:
                self._begun[f"unshard {module}"] = _Begun(begin, now(), group.group_name)

    def gathered(self, module: str, begin: int) -> None:
        """Note that a gather was waited for, from `begin` until now."""
        if self._counts:
            times, gather = self._of(module), self._begun.get(f"unshard {module}")
            times.unshard_s += self._spent(begin) / _NS
            if gather is not None:
                times.ahead_s += max(0, begin - gather.begin) / _NS
                self._ended(f"unshard {module}", begin)

    def reduction_started(
        self, module: str, begin: int, group: ProcessGroup, num_bytes: int
    ) -> None:
        """Note that reducing gradients was started in `group`, from `begin` until now."""
        if self._counts:
            self._of(module).reduce_s += self._spent(begin) / _NS
            self._num_bytes += num_bytes
            self._begun[f"reduce {module}"] = _Begun(begin, now(), group.group_name)

    def reduced(self, module: str, begin: int) -> None:
        """Note that a reduction was waited for, from `begin` until now."""
        if self._counts:
            self._of(module).reduce_s += self._spent(begin) / _NS
            self._ended(f"reduce {module}", begin)

    def end_backward(self, group: ProcessGroup) -> None:
        """End the step: `times` are its times; if there are listeners, its spans are emitted."""
        self.times = ShardedStepTimes(
            exposed_comm_s=self._exposed / _NS,
            exposed_forward_s=self._exposed_forward / _NS,
            turns_s=self._turns / _NS,
            step=self.times.step + 1,
            num_bytes=self._num_bytes,
            modules=self._modules,
        )
        if spans.listeners:
            self._emit(group)
        self._clear()

    def reset(self) -> None:
        """Drop what a step that failed has noted."""
        self._clear()

    def _of(self, module: str) -> ModuleTimes:
        return self._modules.setdefault(module, ModuleTimes())

    def _spent(self, begin: int) -> int:
        spent = now() - begin
        self._exposed += spent
        return spent

    def _ended(self, name: str, begin: int) -> None:
        """Note that what had begun was waited for, from `begin` until now."""
        begun = self._begun.pop(name, None)
        if begun is None or not spans.listeners:
            return
        self._spans.append(
            spans.Span(
                name=name,
                track=spans.MODULES,
                start_ns=begun.begin,
                started_ns=begun.started,
                end_ns=now(),
                group=begun.group_name,
            )
        )
        self._waited(name, begin)

    def _waited(self, name: str, begin: int) -> None:
        if spans.listeners:
            wait = spans.Span(name=name, track=spans.WAITS, start_ns=begin, end_ns=now())
            self._spans.append(wait)

    def _emit(self, group: ProcessGroup) -> None:
        rank, details = group.global_ranks[group.rank()], {"step": self.times.step}
        emit_phases(group, details, self._forward, self._backward, self._last, now())
        for span in self._spans:
            spans.emit(replace(span, global_rank=rank, details=details))


def emit_phases(
    group: ProcessGroup, details: dict[str, Any], forward: int, backward: int, last: int, end: int
) -> None:
    """Emit the spans of a step's phases; of one that begins at 0, none.

    Args:
        group: The ranks that reduce gradients.
        details: The number of the step.
        forward, backward: When forward began, and when the first gradient was ready.
        last: When backward had nothing left to compute.
        end: When all gradients were reduced.
    """
    phases = ("forward", forward, backward), ("backward", backward, last)
    for name, start_ns, end_ns in (*phases, ("wait for gradients", last, end)):
        if start_ns:
            spans.emit(
                spans.Span(
                    name=name,
                    global_rank=group.global_ranks[group.rank()],
                    group=group.group_name,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    details=details,
                )
            )


class _Begun(NamedTuple):
    """What a rank has begun: from when until when it did, and in which group."""

    begin: int
    started: int
    group_name: str
