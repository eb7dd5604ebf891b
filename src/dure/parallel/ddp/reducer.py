"""The reducer: averages gradients over the ranks while backward computes the next ones.

One backward with reduction:

1. *begin*: the first sign of a backward that belongs to a synchronised forward (a gradient arrives
   at an output of the module, or at a parameter) asks autograd to call *finish* at its end.
2. *on_gradient*: each time a parameter's gradient has been accumulated it is moved to its bucket,
   which owes one less. When a bucket owes nothing, and all buckets before it have been started, its
   reduction is started too. It runs beside the rest of backward.
3. *finish*: buckets that still owe gradients are completed (with zeros for a
   parameter that got no gradient) and started; then the rank waits for all of them.

The last bucket is started in *finish* and never before. It carries the used-parameter bitmap
(outcome.py): which parameters each rank used, and whether it had errors. A rank whose loss does not
depend on some parameter therefore takes part in every reduction, no rank ever waits for one that
gave up, and all raise the same error at the same step. A backward that ends with an exception never
comes to *finish*; the next forward makes up for it (*abandon*), which reports it to the others.

A backward without synchronisation (`no_sync`) only moves gradients to their buckets; the next
synchronised one reduces the sums.

Note "Averages". A bucket is averaged by one asynchronous all_reduce of its flat tensor. Three
things change that (`Reductions`):

* *Sparse entries* cannot be averaged by the collective: they are summed and divided here.
* *A communication hook* (comm_hooks.py) replaces the collective. It divides by the number of ranks.
* *A divisor*: in a `Join` ranks may have run out of inputs, and sums are divided by the number of
  those that have some. Then the collective sums, and the division is made here; a hook's result,
  already divided by all ranks, is scaled.

Note "Rebuilding". The first backward shows in which order gradients become ready. At its end rank 0
sends its order to all, who plan the same buckets by it; when the second one begins, buckets are cut
again from their memory (buckets.py). This moment is the same on all ranks, as they
count the same backwards. If any parameter may be unused, the order means little and stays as it is.

Note "Static graph". The first backward starts nothing before its end, and counts how often each
gradient is added to: reentrant checkpoints add several times. The later ones rely on it. Parameters
that no rank used are left out of the buckets from then on.

Note "Hooks of the program". A parameter's own hooks (`register_post_accumulate_grad_hook`), such as
an optimizer step within backward, run when all gradients are reduced, on all ranks for the same
parameters: those that some rank has used. After a forward under `no_sync` they wait for the
reduction. Only where no forward of the wrapper came before a gradient do they run at once.

The group is kept here and not looked up: autograd may call from threads that have no world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.comm.ops import ReduceOp
from dure.comm.profiling import UNRECORDED, communicating, profiler, step
from dure.errors import CommError, HookError, ModuleError
from dure.parallel.ddp.buckets import Bucket, BucketAssignment, ReducerOptions
from dure.parallel.ddp.outcome import (
    ErrorKind,
    ErrorRecord,
    UsageHistory,
    UsedParameters,
    agreed_error,
)
from dure.parallel.ddp.step_times import BucketClock, trace_step
from dure.trace import logs, spans
from dure.training import autograd_hooks
from dure.training.grad_views import DORMANT, GradView, NamedParameter
from dure.training.module_times import StepTimes, now

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.comm_hooks import HookRunner

__all__ = ["Reducer", "Reductions", "Replica"]

_log = logs.logger("parallel")


class Replica(Protocol):
    """The module whose gradients are averaged, as far as its reducer knows it."""

    def announce_backward(self) -> int | None:
        """Tell a `Join` that buckets will be reduced; return what to divide sums by, if not all."""
        ...

    def explain(self, error: CommError) -> None:
        """Say in an error what it may come from."""
        ...

    def replaced(self, views: Sequence[GradView]) -> Sequence[GradView]:
        """Return those of `views` whose parameters the module does not have any more."""
        ...

    def step_ended(self, number: int, clock: BucketClock, error: Exception | None) -> None:
        """Take note of a synchronised step, which took what `clock` says."""
        ...


def _no_replica() -> Replica | None:
    return None


class Reductions:
    """Reduces the buckets of one reducer.

    Threads:
        As the reducer's; its lock is held.

    Attributes:
        hook: The communication hook.
        divisor: Sums of gradients are divided by it; None is the number of ranks.
        awaited_too: Also waited for at the end of the next backward.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.hook: HookRunner | None = None
        self.divisor: int | None = None
        self.awaited_too: list[torch.futures.Future[Any]] = []

    @property
    def averages(self) -> bool:
        """Whether the collectives average over all ranks, and do not sum."""
        return self.divisor is None

    def verify_possible(self) -> None:
        """Raise `ModuleError` if the group has ended."""
        if self._group.closed:
            raise ModuleError(
                "the process group of this DistributedDataParallel has been destroyed",
                group=self._group.group_name,
                seen="destroy_process_group() and shrink() end groups",
                fix="Wrap the module again, on the new group: DistributedDataParallel(ddp.module).",
            )

    def start(self, bucket: Bucket, buckets: Sequence[Bucket]) -> None:
        """Start the reduction of `bucket`, the next one of `buckets`, which is filled."""
        sparse = bucket.sparse
        if self.hook is not None:
            if bucket.views:
                self.hook.start(bucket, bucket is _last_filled(buckets))
        elif sparse is not None:
            bucket.work = self._group.all_reduce(sparse.take(), ReduceOp.SUM, async_op=True)
        else:
            # The last one has nothing to run beside; alone, it needs no thread to be woken for it.
            alone = bucket is buckets[-1] and not any(map(_is_under_way, buckets))
            bucket.work = self._group.all_reduce(bucket.flat, self._op(), async_op=not alone)

    def wait(self, buckets: Sequence[Bucket], used_parameters: UsedParameters) -> None:
        """Wait for all buckets, and make averages of them."""
        if self.hook is not None:
            self.hook.finish(buckets, used_parameters, self._op())
        for bucket in buckets:
            if bucket.work is not None:
                bucket.work.wait()
            self._divide(bucket)
        while self.awaited_too:
            self.awaited_too.pop().wait()

    def take_hook_error(self) -> HookError | CommError | None:
        """Return the communication hook's error in this backward, and forget it."""
        return None if self.hook is None else self.hook.take_error()

    def _op(self) -> ReduceOp:
        return ReduceOp.AVG if self.averages else ReduceOp.SUM

    def _divide(self, bucket: Bucket) -> None:
        """Make averages of sums, where neither the collective nor a hook did."""
        n, sparse = self._group.size(), bucket.sparse
        hooked = self.hook is not None  # a hook divides by the number of ranks
        if sparse is not None:
            by = (self.divisor or n) / (n if hooked else 1)
            sparse.tensor = sparse.tensor if by == 1 else sparse.tensor / by
        elif self.divisor is not None:
            bucket.buffer.div_(self.divisor / n if hooked else self.divisor)


def _is_under_way(bucket: Bucket) -> bool:
    return bucket.work is not None and not bucket.work.is_completed()


def _last_filled(buckets: Sequence[Bucket]) -> Bucket:
    """Return the last bucket with gradients: the very last may have the bitmap alone."""
    return buckets[-1] if buckets[-1].views else buckets[-2]


class Reducer:
    """Averages the gradients of a module's parameters over a group; see the module's text.

    Threads:
        Autograd may call from any of its threads, several at once; a lock makes each gradient one
        step. `prepare` is called by the thread that runs forward.

    Attributes:
        assignment: Where gradients lie.
        buckets: In the order in which they are reduced.
        times: Durations of the last synchronized step.
        num_reduced: Completed backwards with reduction.
        ready_order: Numbers of parameters in the order their gradients came in the last of these.
        rebuilt: Whether the buckets follow the order of the first backward.
        reductions: How buckets are reduced: here a communication hook is registered.
        remove_hooks: Takes the parameters' hooks away: their gradients are no longer averaged.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[NamedParameter],
        options: ReducerOptions,
        replica: Callable[[], Replica | None] = _no_replica,
    ) -> None:
        self.group, self.options, self._replica = group, options, replica
        self.allow_unused, self.static_graph = options.allow_unused, options.static_graph
        self.parameter_names = [p.name for p in parameters]
        self.assignment = BucketAssignment(group, parameters, options)
        self.all_views, self.buckets = self.assignment.views, self.assignment.buckets
        self._used_parameters = self.assignment.used_parameters
        self.first_sizes = self.assignment.bucket_sizes()
        self.times, self.clock = StepTimes(), BucketClock()
        self.num_reduced = 0
        self.rebuilt = False
        self.ready_order: list[int] = []
        self.reductions = Reductions(group)
        self._lock = threading.RLock()
        self._armed = False  # the last forward was synchronised and has had no backward yet
        self._keeping = False  # the last forward was under `no_sync`
        self._syncing = False  # between begin and finish
        self._next = 0  # the next bucket to start
        self._owing = 0  # gradients that the present backward still owes
        self._counting = self.static_graph
        self._errors: list[ErrorRecord] = []
        self._with_hooks: list[GradView] = []  # reduced, and the program has hooks of theirs
        self._probe = self.all_views[-1]  # likely to be in any graph
        self._usage = UsageHistory()
        self._task, self._nested = -1, False  # backwards within a backward have other numbers
        self.remove_hooks = autograd_hooks.on_gradients(
            self, Reducer.on_gradient, [view.parameter for view in self.all_views]
        )
        self._program_hooks = [
            autograd_hooks.hooks_of_program(view.parameter) for view in self.all_views
        ]

    def report(self, module: str) -> None:
        """Write one line about the buckets of a module of this type."""
        caps = ", ".join(logs.size_text(cap) for cap in self.options.caps)
        unused = "allowed" if self.allow_unused else "an error"
        self._report_buckets(
            f"{module} on {self.group.size()} ranks, bucket caps {caps}, unused parameters are "
            f"{unused}"
        )

    @logs.never_fails
    def _report_buckets(self, what: str) -> None:
        if logs.reports(_log, self.group.rank()):
            text = self.assignment.describe()
            logs.decided(_log, self.group.rank(), "DistributedDataParallel, %s: %s", what, text)

    def views(self) -> Iterator[GradView]:
        """Go through the gradients in all buckets."""
        return (view for bucket in self.buckets for view in bucket.views)

    @property
    def hook_name(self) -> str:
        """Name of the communication hook; empty without one."""
        return "" if self.reductions.hook is None else self.reductions.hook.name

    def set_static_graph(self) -> None:
        """Take the first backward, which is yet to come, as the model of all."""
        self.static_graph = self.allow_unused = self._counting = True

    # ---------------------------------------------------------------- buckets

    def _learn_order(self) -> None:
        """Plan the buckets of the later backwards; see "Rebuilding" in the module's text.

        Collective:
            All ranks, at the end of the first backward.
        """
        leaves_out = self.static_graph or self.options.leave_out_unused
        if not self.rebuilt and (leaves_out or not self.allow_unused):
            used = self._used_parameters.used() if leaves_out else None
            self.assignment.learn(self.group, self.ready_order, used)

    def _rebuild(self) -> None:
        """Cut the buckets again, if there is a plan."""
        if self.assignment.rebuild():
            self.rebuilt = True
            self.buckets = self.assignment.buckets
            self._report_buckets("in the order of the first backward")
            self._used_parameters = self.assignment.used_parameters
            for view in self.all_views:
                if view.used and view.buffer_index == DORMANT:  # under no_sync, after the plan
                    view.used = False
                    self._errors.append(ErrorRecord(ErrorKind.CHANGED, view))

    # ---------------------------------------------------------------- forward

    def prepare(self, sync: bool) -> None:
        """Begin a forward.

        Args:
            sync: Whether the backward after it reduces.
        """
        with self._lock:
            self.reductions.verify_possible()
            if self._syncing and not autograd_hooks.in_backward():
                self._abandon()
            self._usage.warn_once()
            self._armed, self._keeping = sync, not sync
            if sync:
                self.clock.begin_forward()

    def check_finished(self) -> None:
        """Raise `ModuleError` if a backward ended with an exception and was not made up for."""
        if self._syncing and not autograd_hooks.in_backward():
            raise ModuleError(
                "the last backward did not come to its end",
                group=self.group.group_name,
                seen="it raised an exception",
                fix="The next forward makes up for it: the other ranks learn of it then.",
            )

    def on_output(self, below: Sequence[Any]) -> None:
        """Take in that a gradient has come to an output of the module."""
        with self._lock:
            node = self._probe.node
            if not self._syncing and autograd_hooks.fills_gradients(node, below):
                if not autograd_hooks.will_reach(node) and self._probe.refresh():
                    for view in self.all_views:
                        view.refresh()
                self._begin()

    # ---------------------------------------------------------------- backward

    def reduce_kept(self) -> None:
        """Reduce the sums of backwards without reduction."""
        self.prepare(True)
        with self._lock:
            self._begin(at_end=False)
        self._finish()

    def _begin(self, at_end: bool = True) -> None:
        """Begin a reduction; with `at_end`, `finish` follows when the running backward ends."""
        replica = self._replica()
        self.reductions.divisor = None if replica is None else replica.announce_backward()
        for view in self.all_views:
            if view.used and not view.recollect():
                self._errors.append(ErrorRecord(ErrorKind.MOVED, view))
        self._rebuild()
        self._syncing, self._armed, self._next = True, False, 0
        if at_end and self.allow_unused and not self.static_graph:
            self._look_ahead()
        self._owing = sum(bucket.pending for bucket in self.buckets)
        self.ready_order = []
        self.clock.begin_backward()
        if at_end:
            autograd_hooks.at_end(self._finish)

    def _look_ahead(self) -> None:
        """Find out what this backward will not reach, so that no bucket waits for it.

        Not after backwards within the backward (reentrant checkpoints): it is not known
        what they will reach.
        """
        self._task = autograd_hooks.task_id()
        if self._nested or not self.num_reduced:
            return
        for bucket in self.buckets:
            for view in bucket.views:
                if not view.will_be_filled():
                    view.left = 0
                    bucket.idle.append(view)
                    bucket.pending -= 1

    def on_gradient(self, number: int) -> None:
        """Take in a gradient that autograd has just accumulated, by its parameter's number."""
        view = self.all_views[number]
        with self._lock:
            if self._armed and not self._syncing:
                self._begin()
            if view.parameter.grad is None:
                return  # autograd came by with nothing; `finish` sees to the view
            unexpected = view.buffer_index == DORMANT or (self._syncing and view.left <= 0)
            if unexpected and not self._is_welcome(view):
                return
            if not view.adopt():
                self._errors.append(ErrorRecord(ErrorKind.MOVED, view))
                return
            view.used = True
            if not self._syncing:
                hooked = not self._keeping and self._program_hooks[number]
                if hooked and not autograd_hooks.is_shared(view.parameter):
                    self._run_hooks_of(view)
                return
            view.left -= 1
            if view.left == 0:
                self._on_ready(view)

    def _on_ready(self, view: GradView) -> None:
        """Note that a gradient is complete, and start the buckets that are."""
        self.ready_order.append(view.number)
        if self.allow_unused and autograd_hooks.task_id() != self._task:
            self._nested = True
        self._owing -= 1
        self.buckets[view.buffer_index].pending -= 1
        if self._counting:
            return
        last = len(self.buckets) - 1
        while self._next < last and self.buckets[self._next].pending == 0:
            self._start_next()

    def _is_welcome(self, view: GradView) -> bool:
        """Return whether a gradient that no bucket waits for can still be taken in."""
        if self._counting:
            return True
        static = self.static_graph or view.buffer_index == DORMANT
        if not static and view.buffer_index >= self._next:
            return True
        self._errors.append(ErrorRecord(ErrorKind.CHANGED if static else ErrorKind.LATE, view))
        return False

    def _start_next(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self.buckets[self._next]
        self._next += 1
        start = now()
        for view in bucket.idle:
            if not view.used:
                view.contribute_unused()
        with self._record_of(bucket) if profiler._is_profiler_enabled else UNRECORDED:
            self.reductions.start(bucket, self.buckets)
        self.clock.launched(start, bucket.num_bytes)

    def _record_of(self, bucket: Bucket) -> AbstractContextManager[object]:
        """Return the record, in a profile, of starting to reduce a bucket."""
        name = f"DistributedDataParallel.reduce_bucket ({bucket.index})"
        return communicating(name, self.group, bucket.flat)

    def _finish(self) -> None:
        """End a backward: start what is left, wait for all, and show the results."""
        with self._lock:
            self.clock.end_compute()
            idle = self._owing or any(bucket.idle for bucket in self.buckets)
            unused = [view for view in self.views() if not self._is_used(view)] if idle else []
            self._note_errors(unused)
            searched = self.allow_unused and not self.static_graph
            self._usage.note([view.number for view in unused], searched)
            error = self._conclude(unused)
            replica = self._replica()
            if replica is not None:
                replica.step_ended(self.num_reduced - 1, self.clock, error)
            if spans.listeners:
                trace_step(self.clock, self.group, self.buckets)
            if error is not None:
                raise error
            self._run_hooks()

    def _run_hooks(self) -> None:
        """Run the program's hooks of the gradients that were reduced."""
        reduced, self._with_hooks = self._with_hooks, []
        for view in reduced:
            self._run_hooks_of(view)

    def _run_hooks_of(self, view: GradView) -> None:
        with torch.no_grad():
            for hook in list(self._program_hooks[view.number].values()):
                hook(view.parameter)

    def _ddp_graph_static(self) -> bool:
        """Tell whether static_graph=True could have been passed (torch's name)."""
        return self._usage.is_static

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks used each parameter in the last step (torch's name)."""
        flags = self._used_parameters.flags[: len(self.all_views)]
        counts = flags.abs().double() * (self.group.size() if self.reductions.averages else 1)
        return counts.round().to(torch.int32)

    def _is_used(self, view: GradView) -> bool:
        """Return whether a parameter has a gradient; take it in if it came without its hook."""
        if view.used or view.left <= 0 or not view.refresh():
            return view.used
        came = view.parameter.grad is not None and view.buffer_index >= self._next
        if came and view.adopt():
            view.used, view.left = True, 0
            self.ready_order.append(view.number)
        return view.used

    def _note_errors(self, unused: Sequence[GradView]) -> None:
        """Note what is wrong with a backward that has come to its end."""
        moved = [v for v in unused if v.parameter.grad is not None and not v.fits()]
        self._errors += [ErrorRecord(ErrorKind.MOVED, view) for view in moved]
        replica = self._replica()
        gone = replica.replaced(unused) if unused and replica is not None else ()
        self._errors += [ErrorRecord(ErrorKind.REPLACED, view) for view in gone]
        if not self.allow_unused:
            # One that was frozen after the module was wrapped is not missed.
            missed = [view for view in unused if view.parameter.requires_grad]
            self._errors += [ErrorRecord(ErrorKind.MISSING, view) for view in missed]
        elif self.static_graph and not self._counting and self._owing:
            absent = [view for view in self.views() if view.left > 0]
            self._errors += [ErrorRecord(ErrorKind.CHANGED, view) for view in absent]

    def _conclude(self, unused: Sequence[GradView]) -> Exception | None:
        """Reduce what is left, and show the results; return the error that is due."""
        errors, self._errors = self._errors, []
        try:
            exposed = self.clock.exposed
            for view in unused:
                if view.left > 0:
                    view.contribute_unused()
            self._used_parameters.write(unused, bool(errors))
            while self._next < len(self.buckets):
                self._start_next()
            waiting = "DistributedDataParallel.wait_for_buckets"
            with step(waiting) if profiler._is_profiler_enabled else UNRECORDED:
                self.reductions.wait(self.buckets, self._used_parameters)
            self.clock.reduced(exposed)
            self.times = self.clock.times()
            return self._settle(errors)
        except CommError as error:
            replica = self._replica()
            if replica is not None:
                replica.explain(error)
            raise
        finally:
            self._reset()

    def _settle(self, errors: Sequence[ErrorRecord]) -> Exception | None:
        """Show the results, learn from the first backward; return the error that is due."""
        self._with_hooks = []
        plain = self.reductions.averages and self._used_parameters.all_used()
        used = None if plain else self._used_parameters.used()
        for view in self.views():
            used_somewhere = used is None or used[view.number]
            view.settle(used_somewhere)
            if used_somewhere and not view.used and not view.parameter.requires_grad:
                self._errors.append(ErrorRecord(ErrorKind.FROZEN, view))  # for the next step
            view.used = False
            if used_somewhere and self._program_hooks[view.number]:
                self._with_hooks.append(view)
        self.num_reduced += 1
        if self._used_parameters.error():
            mine = self.reductions.take_hook_error()
            hook_failed = [] if mine is None else [ErrorRecord(ErrorKind.HOOK)]
            agreed = agreed_error(self.group, [*errors, *hook_failed], self.parameter_names)
            return mine or agreed
        self._learn()
        return None

    def _learn(self) -> None:
        """Take from a good backward what the later ones can rely on."""
        if self.ready_order:
            self._probe = self.all_views[self.ready_order[0]]
        self._learn_order()
        if self._counting and self.ready_order:
            self._counting = False
            for view in self.all_views:
                view.expected -= view.left
            for bucket in self.buckets:
                bucket.expect()

    def shadow(self) -> None:
        """Take part in the reductions of the other ranks' backward, and add nothing to them.

        For a rank whose inputs have ended (`Join`). Its parameters get the others' gradients.

        Collective:
            Where the other ranks of the group run a synchronised backward.
        """
        with self._lock:
            self._reset()
            self._rebuild()
            self._armed, self.ready_order = False, []
            error = None
            try:
                self._used_parameters.write_nothing()
                for bucket in self.buckets:
                    for view in bucket.views:
                        view.contribute_nothing()
                    self.reductions.start(bucket, self.buckets)
                self.reductions.wait(self.buckets, self._used_parameters)
                error = self._settle(())
            finally:
                self._reset()
            if error is not None:
                raise error
            self._run_hooks()

    def _abandon(self) -> None:
        """Make up for a backward that ended with an exception: the other ranks wait for this one.

        Collective:
            While they are at the end of that backward. They get an error; this rank's program has
            had its own.
        """
        self.clock.end_compute()
        self._errors.append(ErrorRecord(ErrorKind.BROKEN))
        cleared = [view.parameter for view in self.views() if view.parameter.grad is None]
        error = self._conclude([view for view in self.views() if not view.used])
        for parameter in cleared:
            parameter.grad = None
        if error is not None:
            raise error

    def _reset(self) -> None:
        self._syncing, self._next = False, 0
        for view in self.all_views:
            view.left = view.expected
        for bucket in self.buckets:
            bucket.reset()
