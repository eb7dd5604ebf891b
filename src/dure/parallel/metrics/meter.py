"""`StepMeter`: measures where the time of a training step goes, around any loop.

It looks at a step from five places, and needs no change inside the loop:

* the iterator over batches that `batches` wraps: how long the next one took;
* a hook before the module's forward, and one on the gradients of its outputs: when forward and
  backward began;
* a callback of autograd at the end of backward: when it ended. It is asked for after
  `DistributedDataParallel` asked for its own, and so comes when gradients have been reduced;
* the module's `step_times`, if it has them: how much of that was waiting for communication;
* hooks around the optimizer's step.

Times are of the host's clock. On a GPU, where calls return before the work is done, they show when
work was handed over; the step's total is right as soon as the loop reads a result in each step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from dure.comm.queries import get_rank, is_initialized
from dure.comm.world import resolve
from dure.errors import UsageError
from dure.parallel.metrics.split import (
    FIELDS,
    StepReport,
    StepSplit,
    median_modules,
    median_split,
)
from dure.trace import line, spans
from dure.training.autograd_hooks import at_end, on_outputs
from dure.training.module_times import ModuleTimes, StepTimes
from dure.training.pytrees import tensors_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["StepMeter"]

T = TypeVar("T")
_NS = 1e9
_KEPT_MODULES = 100


class _Timed(Protocol):
    """A module that communicates during backward, such as `DistributedDataParallel`."""

    @property
    def step_times(self) -> StepTimes: ...


class _MeasuredStep:
    """A step as far as it has come; times in nanoseconds."""

    __slots__ = (
        "backward",
        "data",
        "exposed",
        "forward",
        "num_bytes",
        "samples",
        "total",
        "update",
    )

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.exposed = self.update = self.total = 0
        self.samples = self.num_bytes = 0

    def split(self) -> StepSplit:
        """Return the finished step."""
        return StepSplit(
            data_wait_s=self.data / _NS,
            forward_s=self.forward / _NS,
            backward_s=self.backward / _NS,
            exposed_comm_s=self.exposed / _NS,
            optimizer_s=self.update / _NS,
            total_s=self.total / _NS,
            samples=self.samples,
            num_bytes=self.num_bytes,
        )


class StepMeter:
    """Measures steps: data wait, forward, backward, exposed communication, optimizer.

        meter = dure.StepMeter(ddp, optimizer)
        for images, labels in meter.batches(loader):
            ...                                       # the loop as it was
        print(meter.report())

    With an optimizer a step ends when a batch is asked for after an update, so that gradient
    accumulation makes one step of several batches; without one, each batch is a step. Work
    between two loops over batches, such as an evaluation, is no part of any step.

    Cost:
        Some 15 microseconds a step; no communication but that of `report`.

    Threads:
        One thread a rank runs the loop. A copy of a watched module has a meter that watches
        nothing.

    Args:
        module: Is trained; None measures neither forward nor backward.
        optimizer: Updates it; None measures no update.
        count: Tells how many samples a batch has; by default the first dimension of its first
            tensor.
        keep: How many steps to keep; older ones are forgotten.
        process_group: The ranks that `report` is about; by default the module's own, or all.

    Raises:
        UsageError: `optimizer` is no torch optimizer.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = dist.StepMeter(model, optimizer)
        for batch in meter.batches([torch.ones(2, 4)] * 3):
            model(batch).sum().backward()
            optimizer.step()
        assert meter.num_steps == 3
        report = meter.report()  # its text is a table; all ranks call
        assert report.samples_per_s > 0
        ```
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        count: Callable[[Any], int] | None = None,
        keep: int = 10_000,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.num_gathers = 0
        self._group = process_group or getattr(module, "process_group", None)
        self._count = count or _num_samples
        self._timed = cast("_Timed", module) if hasattr(module, "step_times") else None
        self._last_reduced = self._timed.step_times.step if self._timed else 0
        self._finished: deque[_MeasuredStep] = deque(maxlen=keep)
        self._num_finished = 0
        self._modules: deque[Mapping[str, ModuleTimes]] = deque(maxlen=_KEPT_MODULES)
        self._step = _MeasuredStep()
        self._asked = self._forward = self._backward = self._update = self._inner = 0
        self._has_optimizer, self._updated = optimizer is not None, False
        self._rank = get_rank() if is_initialized() else 0
        self._handles = [*self._watch(module), *self._watch_updates(optimizer)]

    def _watch(self, module: torch.nn.Module | None) -> list[Any]:
        if module is None:
            return []
        return [
            # Before those of a module that gathers its parameters, which is a part of forward.
            module.register_forward_pre_hook(self._forward_begins, prepend=True),
            module.register_forward_hook(self._forward_ended),
        ]

    def _watch_updates(self, optimizer: torch.optim.Optimizer | None) -> list[Any]:
        if optimizer is None:
            return []
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise UsageError(
                "StepMeter cannot watch this optimizer",
                seen=f"a {type(optimizer).__name__}",
                fix="Give a torch.optim.Optimizer, or none: each batch is then a step.",
            )
        return [
            optimizer.register_step_pre_hook(self._update_begins),
            optimizer.register_step_post_hook(self._update_ended),
        ]

    def __reduce__(self) -> tuple[type[StepMeter], tuple[()]]:
        """Let a module with hooks of a meter be copied and saved."""
        return (StepMeter, ())

    def close(self) -> None:
        """Stop watching; measurements stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---------------------------------------------------------------- around the loop

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Go through `loader`, and measure how long each batch is waited for."""
        self._asked = asked = self._pause()
        source = iter(loader)
        try:
            while True:
                try:
                    batch = next(source)
                except StopIteration:
                    self._asked = 0  # waiting for the end is no part of a step
                    return
                got = time.monotonic_ns()
                self._forward = 0
                self._step.data += got - asked
                self._step.samples += self._count(batch)
                if spans.listeners:
                    self._emit("data wait", asked, got)
                yield batch
                self._asked = asked = self._pause()
        finally:
            self._pause()

    @contextmanager
    def step(self, samples: int = 0) -> Generator[None]:
        """Measure the block as one step, in a loop that has no iterator over batches."""
        self._pause()
        self._asked = time.monotonic_ns()
        self._step.samples += samples
        try:
            yield
        finally:
            self.end_step()

    def end_step(self) -> None:
        """End the step here; time until the next batch is asked for belongs to no step."""
        self._updated = True
        self._pause()

    def _pause(self) -> int:
        """Add what has passed to the step, and end it if it is complete; return the time."""
        now = time.monotonic_ns()
        if self._asked:
            step = self._step
            step.total += now - self._asked
            self._asked = 0
            if self._updated or not self._has_optimizer:
                self._finished.append(step)
                self._num_finished += 1
                line.progress(self._num_finished)
                self._step, self._updated = _MeasuredStep(), False
        return now

    # ---------------------------------------------------------------- hooks

    def _forward_begins(self, *_: object) -> None:
        if not self._forward and torch.is_grad_enabled():
            self._forward = time.monotonic_ns()

    def _forward_ended(self, _module: object, _inputs: object, outputs: object) -> None:
        if torch.is_grad_enabled():
            on_outputs(outputs, self._backward_begins)

    def _backward_begins(self, _: object) -> None:
        if self._backward:
            return
        now = self._backward = time.monotonic_ns()
        if self._forward:
            self._step.forward += now - self._forward
        at_end(self._backward_ended)

    def _backward_ended(self) -> None:
        now, step = time.monotonic_ns(), self._step
        exposed = before = 0
        reduced = self._timed.step_times if self._timed is not None else None
        if reduced is not None and reduced.step != self._last_reduced:
            self._last_reduced = reduced.step
            exposed = int(reduced.exposed_comm_s * _NS)
            before = int(reduced.exposed_forward_s * _NS)
            step.exposed += exposed
            step.forward = max(0, step.forward - before)
            if reduced.modules:
                self._modules.append(reduced.modules)
            step.num_bytes += reduced.num_bytes
        elif spans.listeners:  # otherwise the module emits them itself
            self._emit("forward", self._forward, self._backward)
            self._emit("backward", self._backward, now)
        step.backward += max(0, now - self._backward - (exposed - before))
        self._forward = self._backward = 0

    def _update_begins(self, *_: object) -> None:
        step = self._step
        self._inner = step.forward + step.backward + step.exposed
        self._update = time.monotonic_ns()

    def _update_ended(self, *_: object) -> None:
        now, step = time.monotonic_ns(), self._step
        # An optimizer that takes a closure runs forward and backward itself.
        inner = step.forward + step.backward + step.exposed - self._inner
        step.update += now - self._update - inner
        self._updated = True
        if spans.listeners and not inner:
            self._emit("optimizer", self._update, now)

    def _emit(self, name: str, start: int, end: int) -> None:
        if start:
            spans.emit(spans.Span(name=name, global_rank=self._rank, start_ns=start, end_ns=end))

    # ---------------------------------------------------------------- what was measured

    @property
    def num_steps(self) -> int:
        """How many steps have ended, also those that are kept no longer."""
        return self._num_finished

    @property
    def last(self) -> StepSplit:
        """The last finished step; zeros before there is one."""
        return self._finished[-1].split() if self._finished else StepSplit()

    def steps(self, last: int | None = None) -> list[StepSplit]:
        """Return the kept steps of this rank, or the last so many of them, the oldest first."""
        kept = len(self._finished)
        first = 0 if last is None else max(0, kept - last)
        return [step.split() for step in islice(self._finished, first, kept)]

    def report(self, last: int | None = None) -> StepReport:
        """Compare the ranks: the medians of each one's kept steps, or of the last so many.

        Collective:
            All ranks of the group, where there is one.

        Cost:
            One all_gather of 8 numbers a rank.
        """
        steps = self.steps(last)
        mine = median_split(steps)
        rank, rows = self._gathered([float(getattr(mine, name)) for name in FIELDS])
        ranks = tuple(StepSplit(**dict(zip(FIELDS, row, strict=True))) for row in rows)
        modules = median_modules(list(self._modules)[-last:] if last else self._modules)
        return StepReport(ranks=ranks, num_steps=len(steps), rank=rank, modules=modules)

    def _gathered(self, row: list[float]) -> tuple[int, list[list[float]]]:
        """Return this rank's number and the rows of all ranks; only the own where it is alone."""
        if self._group is None and not is_initialized():
            return 0, [row]
        group = resolve(self._group, "StepMeter.report")
        if group.size() == 1:
            return 0, [row]
        mine = torch.tensor(row, dtype=torch.float64, device=group.message_device)
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        group.all_gather(rows, mine)
        self.num_gathers += 1
        return group.rank(), [r.tolist() for r in rows]


def _num_samples(batch: object) -> int:
    """Return the first dimension of the first tensor in `batch`; 1 where it has none."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, torch.Tensor):
        first = next(tensors_of(batch), None)
    return first.shape[0] if first is not None and first.dim() else 1
