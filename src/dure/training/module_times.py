"""What a step spends where, measured on the host's clock around what communicates.

    forward                       backward                          wait for gradients
    |--[a]----[b]----[c]----------|----[c]----[b]----[a]------------|-----|
       |-- b, ahead --|                       |------ reduce c ---------|

Communication that runs while a rank computes costs only memory bandwidth. The *exposed* part costs
time: in it the step only starts communication or waits for it. Where parameters are
gathered, it is also measured by module: how long its gather ran *ahead*, while something else
computed; how long it was then waited for; and how long reducing its gradients was started or
waited for.

If there are listeners, phases, gathers, reductions and waits are emitted as spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.trace import spans

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["ModuleClock", "ModuleTimes", "StepClock", "StepTimes"]

now = time.monotonic_ns
_NS = 1e9


@dataclass(slots=True)
class ModuleTimes:
    """What one module's communication took in a step, in seconds.

    Attributes:
        ahead_s: Its gathers ran while something else computed.
        unshard_s: Starting its gathers, and waiting for them.
        reduce_s: Starting to reduce its gradients, and waiting for that.

    Obtained from:
        `StepReport.modules`.
    """

    ahead_s: float = 0.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one backward that reduces gradients, and of the forward before it.

    Attributes:
        forward_s: From the call of forward to the first gradient of backward.
        backward_s: From the first gradient of backward to the last.
        comm_s: From the start of the first bucket's reduction to the end of the last one's; 0 for
            sharded modules, which have `modules`.
        exposed_comm_s: The part of the step in which this rank only started or waited for
            communication.
        exposed_forward_s: The part of `exposed_comm_s` before backward.
        waited_for_ranks_s: The part of `exposed_comm_s` spent waiting for the other ranks to begin
            or end a step; of sharded modules.
        step: Number of the step, from 1; 0 before the first.
        num_bytes: Reduced bytes: this rank's buckets, or unsharded gradients.
        modules: The communication times of each sharded module, by its path.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    exposed_forward_s: float = 0.0
    waited_for_ranks_s: float = 0.0
    step: int = 0
    num_bytes: int = 0
    modules: Mapping[str, ModuleTimes] = field(default_factory=dict[str, ModuleTimes])

    @property
    def overlap_s(self) -> float:
        """Seconds of `comm_s` during which backward continued to compute."""
        return max(0.0, min(self.comm_s - self.exposed_comm_s, self.backward_s))


class StepClock:
    """Stamps of the current step, in nanoseconds of `time.monotonic_ns`; 0: not reached.

    Attributes:
        forward: When forward began.
        backward_start, backward_end: When the first and the last gradient were ready.
        comm_start, comm_end: When the first reduction began, and when all had ended.
        exposed: Nanoseconds in which communication was started or waited for.
        num_bytes: Bytes of gradients that were reduced.
        step: Number of the step, from 1.
    """

    def __init__(self) -> None:
        self.step = 0
        self.reset()

    def reset(self) -> None:
        """Drop the stamps of the step."""
        self.forward = self.backward_start = self.backward_end = 0
        self.comm_start = self.comm_end = self.num_bytes = 0
        self.exposed = self._exposed_forward = self._waited_for_ranks = 0
        self._modules: dict[str, ModuleTimes] = {}

    def begin_backward(self) -> None:
        """Note that the first gradient is ready."""
        self.backward_start = now()
        self._exposed_forward = self.exposed
        self.step += 1

    def end_compute(self) -> None:
        """Note that backward has nothing left to compute."""
        self.backward_end = now()

    def expose(self, begin: int) -> int:
        """Count the time from `begin` until now as exposed; return it."""
        spent = now() - begin
        self.exposed += spent
        return spent

    def times(self) -> StepTimes:
        """Return what the finished step took."""
        return StepTimes(
            forward_s=max(0, self.backward_start - self.forward) / _NS if self.forward else 0.0,
            backward_s=(self.backward_end - self.backward_start) / _NS,
            comm_s=(self.comm_end - self.comm_start) / _NS,
            exposed_comm_s=self.exposed / _NS,
            exposed_forward_s=self._exposed_forward / _NS,
            waited_for_ranks_s=self._waited_for_ranks / _NS,
            step=self.step,
            num_bytes=self.num_bytes,
            modules=self._modules,
        )

    def emit_phases(self, group: ProcessGroup, last: int, end: int) -> None:
        """Emit the spans of the step's phases, except those that have not begun.

        Args:
            group: The ranks that reduce gradients.
            last: When backward had nothing left to compute.
            end: When all gradients were reduced.
        """
        phases = (
            ("forward", self.forward, self.backward_start),
            ("backward", self.backward_start, last),
            ("wait for gradients", last, end),
        )
        for name, start_ns, end_ns in phases:
            if start_ns:
                spans.emit(
                    spans.Span(
                        name=name,
                        global_rank=group.global_ranks[group.rank()],
                        group=group.group_name,
                        start_ns=start_ns,
                        end_ns=end_ns,
                        details={"step": self.step},
                    )
                )


class ModuleClock(StepClock):
    """Measures the communication of sharded modules. Forwards without gradients are not measured.

    Attributes:
        last_times: Of the last backward that has ended.
    """

    def __init__(self) -> None:
        self.last_times = StepTimes()
        self._counts = False
        super().__init__()

    def reset(self) -> None:
        """Drop the stamps of the step."""
        super().reset()
        self._started: dict[str, _Started] = {}
        self._spans: list[spans.Span] = []

    def begin_forward(self) -> None:
        """Note that the outermost module's forward begins."""
        self._counts = torch.is_grad_enabled()
        if self._counts and not self.forward:
            self.forward = now()

    def begin_backward(self) -> None:
        """Note that the first gradient is ready."""
        self._counts = True
        super().begin_backward()

    def waited_for_ranks(self, begin: int) -> None:
        """Note that other ranks were waited for, from `begin` until now."""
        if self._counts:
            self._waited_for_ranks += self.expose(begin)
            self._add_wait("other ranks", begin)

    def gather_started(self, module: str, begin: int, group: ProcessGroup | None) -> None:
        """Note that a gather was asked for, from `begin` until now; it was begun in `group`."""
        if self._counts:
            self._times_of(module).unshard_s += self.expose(begin) / _NS
            if group is not None:
                self._started[f"unshard {module}"] = _Started(begin, now(), group.group_name)

    def gathered(self, module: str, begin: int) -> None:
        """Note that a gather was waited for, from `begin` until now."""
        if self._counts:
            times, gather = self._times_of(module), self._started.get(f"unshard {module}")
            times.unshard_s += self.expose(begin) / _NS
            if gather is not None:
                times.ahead_s += max(0, begin - gather.begin) / _NS
                self._add_span(f"unshard {module}", begin)

    def reduction_started(
        self, module: str, begin: int, group: ProcessGroup, num_bytes: int
    ) -> None:
        """Note that reducing gradients was started in `group`, from `begin` until now."""
        if self._counts:
            self._times_of(module).reduce_s += self.expose(begin) / _NS
            self.num_bytes += num_bytes
            self._started[f"reduce {module}"] = _Started(begin, now(), group.group_name)

    def reduced(self, module: str, begin: int) -> None:
        """Note that a reduction was waited for, from `begin` until now."""
        if self._counts:
            self._times_of(module).reduce_s += self.expose(begin) / _NS
            self._add_span(f"reduce {module}", begin)

    def end_backward(self, group: ProcessGroup) -> None:
        """End the step: set `last_times`; if there are listeners, emit its spans."""
        self.last_times = self.times()
        if spans.listeners:
            rank, details = group.global_ranks[group.rank()], {"step": self.step}
            self.emit_phases(group, self.backward_end, now())
            for span in self._spans:
                spans.emit(replace(span, global_rank=rank, details=details))
        self.reset()

    def _times_of(self, module: str) -> ModuleTimes:
        return self._modules.setdefault(module, ModuleTimes())

    def _add_span(self, name: str, begin: int) -> None:
        """Add the span of what was started, and was waited for from `begin` until now."""
        started = self._started.pop(name, None)
        if started is None or not spans.listeners:
            return
        self._spans.append(
            spans.Span(
                name=name,
                track=spans.MODULES,
                start_ns=started.begin,
                started_ns=started.end,
                end_ns=now(),
                group=started.group_name,
            )
        )
        self._add_wait(name, begin)

    def _add_wait(self, name: str, begin: int) -> None:
        if spans.listeners:
            wait = spans.Span(name=name, track=spans.WAITS, start_ns=begin, end_ns=now())
            self._spans.append(wait)


class _Started(NamedTuple):
    """When a rank started a collective, and in which group."""

    begin: int
    end: int
    group_name: str
