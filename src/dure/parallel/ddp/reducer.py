"""The reducer: averages gradients over the ranks while backward computes the next ones.

One backward with reduction:

1. *begin*: the first sign of a backward that belongs to a synchronised forward (a gradient arrives
   at an output of the module, or at a parameter: hearing.py) asks autograd to call *finish* at its
   end.
2. *on_gradient*: each time a parameter's gradient has been accumulated it is moved to its slot, and
   its bucket owes one less. When a bucket owes nothing, and all buckets before it have been
   started, its reduction is started too (reducing.py). It runs beside the rest of backward.
3. *finish*: buckets that still owe gradients are completed with what is there (zeros for a
   parameter that got no gradient) and started; then the rank waits for all of them.

The last bucket is started in *finish* and never before. It carries the ledger (ledger.py): what
each rank used, and whether it is in trouble. A rank whose loss does not depend on some parameter
therefore takes part in every reduction, no rank ever waits for one that gave up, and all raise the
same error at the same step. A backward that ends with an exception never comes to *finish*; the
next forward makes up for it (*abandon*), which tells the others.

A backward without synchronisation (`no_sync`) only moves gradients to their slots; the next
synchronised one reduces the sums.

Note "Rebuilding". The first backward shows in which order gradients become ready. At its end rank 0
tells its order to all, who plan the same buckets by it; when the second one begins, buckets are cut
anew from the memory that they have (buckets.py). This moment is the same on all ranks, as they
count backwards alike. Where any parameter may be unused, the order means little and stays as it is.

Note "Static graph". The first backward starts nothing before its end, and counts how often each
gradient is added to: reentrant checkpoints add several times. The later ones rely on it. Parameters
that no rank used are left out of the buckets from then on.

The group is kept here and not looked up: autograd may call from threads that have no world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import CommError, ModuleError
from dure.parallel.ddp import graphs
from dure.parallel.ddp.arrangement import Arrangement, ReducerOptions
from dure.parallel.ddp.hearing import hear_parameters
from dure.parallel.ddp.reducing import Reductions
from dure.parallel.ddp.slots import DORMANT, NamedParameter, Slot
from dure.parallel.ddp.telling import tell_step
from dure.parallel.ddp.timing import Clock, StepTimes
from dure.parallel.ddp.usage import Usage
from dure.parallel.ddp.verdicts import Complaint, Trouble, verdict
from dure.trace import spans

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.joining import Announcer

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of a module's parameters over a group; see the module's text.

    Threads: autograd may call from any of its threads, several at once; a lock makes each gradient
    one step. `prepare` is called by the thread that runs forward.

    Attributes:
        arrangement: Where gradients lie.
        buckets: In the order in which they are reduced.
        times: What the last synchronised step took.
        num_reduced: Completed backwards with reduction.
        ready_order: Numbers of parameters in the order their gradients came in the last of these.
        rebuilt: Whether the buckets follow the order of the first backward.
        reductions: How buckets are reduced: here a communication hook is registered.
        remove_hooks: Takes the parameters' hooks away: their gradients are no longer averaged.
        announcer: Tells a `Join` of each backward, and knows the divisor.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[NamedParameter], options: ReducerOptions
    ) -> None:
        self.group, self.options = group, options
        self.allow_unused, self.static_graph = options.allow_unused, options.static_graph
        self.parameter_names = [p.name for p in parameters]
        self.arrangement = Arrangement(group, parameters, options)
        self._slots, self.buckets = self.arrangement.slots, self.arrangement.buckets
        self._ledger = self.arrangement.ledger
        self.first_sizes = self.arrangement.bucket_sizes()
        self.times, self.clock = StepTimes(), Clock()
        self.num_reduced = 0
        self.rebuilt = False
        self.ready_order: list[int] = []
        self.reductions = Reductions(group)
        self.announcer: Announcer | None = None
        self.on_step: Callable[[int, Clock], None] | None = None
        self.on_error: Callable[[Exception], None] | None = None
        self._lock = threading.RLock()
        self._armed = False  # the last forward was synchronised and has had no backward yet
        self._syncing = False  # between begin and finish
        self._next = 0  # the next bucket to start
        self._owing = 0  # gradients that the present backward still owes
        self._counting = self.static_graph
        self._complaints: list[Complaint] = []
        self._probe = self._slots[-1]  # likely to be in any graph
        self._usage = Usage()
        self._task, self._nested = -1, False  # backwards within a backward have other numbers
        self.remove_hooks = hear_parameters(self, self._slots)

    def slots(self) -> Iterator[Slot]:
        """Go through the slots of all buckets."""
        return (slot for bucket in self.buckets for slot in bucket.slots)

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

        Collective: all ranks, at the end of the first backward.
        """
        leaves_out = self.static_graph or self.options.leave_out_unused
        if not self.rebuilt and (leaves_out or not self.allow_unused):
            used = self._ledger.used() if leaves_out else None
            self.arrangement.learn(self.group, self.ready_order, used)

    def _rebuild(self) -> None:
        """Cut the buckets anew, if there is a plan."""
        if self.arrangement.rebuild():
            self.rebuilt = True
            self.buckets, self._ledger = self.arrangement.buckets, self.arrangement.ledger
            for slot in self._slots:
                if slot.used and slot.bucket_index == DORMANT:  # under no_sync, after the plan
                    slot.used = False
                    self._complaints.append(Complaint(Trouble.CHANGED, slot))

    # ---------------------------------------------------------------- forward

    def prepare(self, sync: bool) -> None:
        """Begin a forward; `sync` tells whether the backward after it shall reduce."""
        with self._lock:
            self.reductions.verify_possible()
            if self._syncing and not graphs.in_backward():
                self._abandon()
            self._usage.warn_once()
            self._armed = sync
            if sync:
                self.clock.forward = Clock.now()

    def check_finished(self) -> None:
        """Raise `ModuleError` if a backward ended with an exception and was not made up for."""
        if self._syncing and not graphs.in_backward():
            raise ModuleError(
                "the last backward did not come to its end",
                group=self.group.group_name,
                seen="it raised an exception",
                fix="The next forward makes up for it: the other ranks learn of it then.",
            )

    def on_output(self, below: Sequence[Any]) -> None:
        """Take in that a gradient has come to an output of the module (Any: nodes under it)."""
        with self._lock:
            if not self._syncing and graphs.fills_gradients(self._probe.node, below):
                self._begin()

    # ---------------------------------------------------------------- backward

    def _begin(self) -> None:
        """Ask for `finish` at the end of the backward that is running; once."""
        if self.announcer is not None:
            self.reductions.divisor = self.announcer.backward()
        for slot in self._slots:
            if slot.used:
                slot.recollect()
        self._rebuild()
        self._syncing, self._armed, self._next = True, False, 0
        if self.allow_unused and not self.static_graph:
            self._look_ahead()
        self._owing = sum(bucket.pending for bucket in self.buckets)
        self.ready_order = []
        self.clock.start_backward()
        graphs.at_end(self._finish)

    def _look_ahead(self) -> None:
        """Find out what this backward will not reach, so that no bucket waits for it.

        Not where backwards within the backward were seen (reentrant checkpoints): nothing tells
        what they will reach.
        """
        self._task = graphs.task_id()
        if self._nested or not self.num_reduced:
            return
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not graphs.will_reach(slot.node):
                    slot.left = 0
                    bucket.idle.append(slot)
                    bucket.pending -= 1

    def on_gradient(self, slot: Slot) -> None:
        """Take in a gradient that autograd has just accumulated."""
        with self._lock:
            if self._armed and not self._syncing:
                self._begin()
            if slot.parameter.grad is None:
                return  # autograd came by with nothing; `finish` sees to the slot
            unexpected = slot.bucket_index == DORMANT or (self._syncing and slot.left <= 0)
            if unexpected and not self._is_welcome(slot):
                return
            slot.adopt()
            slot.used = True
            if not self._syncing:
                return
            slot.left -= 1
            if slot.left == 0:
                self._on_ready(slot)

    def _on_ready(self, slot: Slot) -> None:
        """Note that a gradient is complete, and start the buckets that are."""
        self.ready_order.append(slot.number)
        if self.allow_unused and graphs.task_id() != self._task:
            self._nested = True
        self._owing -= 1
        self.buckets[slot.bucket_index].pending -= 1
        if self._counting:
            return
        last = len(self.buckets) - 1
        while self._next < last and self.buckets[self._next].pending == 0:
            self._start_next()

    def _is_welcome(self, slot: Slot) -> bool:
        """Tell whether a gradient that nobody waits for can still be taken in."""
        if self._counting:
            return True
        static = self.static_graph or slot.bucket_index == DORMANT
        if not static and slot.bucket_index >= self._next:
            return True
        self._complaints.append(Complaint(Trouble.CHANGED if static else Trouble.LATE, slot))
        return False

    def _start_next(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self.buckets[self._next]
        self._next += 1
        start = Clock.now()
        for slot in bucket.idle:
            if not slot.used:
                slot.contribute_unused()
        self.reductions.start(bucket, self.buckets)
        self.clock.launched(start, bucket.num_bytes)

    def _finish(self) -> None:
        """End a backward: start what is left, wait for all, and show the results."""
        with self._lock:
            self.clock.backward_end = Clock.now()
            idle = self._owing or any(bucket.idle for bucket in self.buckets)
            unused = [slot for slot in self.slots() if not slot.used] if idle else []
            self._complain(unused)
            searched = self.allow_unused and not self.static_graph
            self._usage.note([slot.number for slot in unused], searched)
            error = self._conclude(unused)
            if self.on_step is not None:
                self.on_step(self.num_reduced - 1, self.clock)
            if spans.listeners:
                tell_step(self)
            if error is not None:
                if self.on_error is not None:
                    self.on_error(error)
                raise error

    def _ddp_graph_static(self) -> bool:
        """Tell whether static_graph=True could have been passed (torch's name)."""
        return self._usage.is_static

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks used each parameter in the last step (torch's name)."""
        flags = self._ledger.flags[: len(self._slots)]
        counts = flags.abs().double() * (self.group.size() if self.reductions.averages else 1)
        return counts.round().to(torch.int32)

    def _complain(self, unused: Sequence[Slot]) -> None:
        """Note what is wrong with a backward that has come to its end."""
        if not self.allow_unused:
            # One that was frozen after the module was wrapped is not missed.
            missed = [slot for slot in unused if slot.parameter.requires_grad]
            self._complaints += [Complaint(Trouble.MISSING, slot) for slot in missed]
        elif self.static_graph and not self._counting and self._owing:
            absent = [slot for slot in self.slots() if slot.left > 0]
            self._complaints += [Complaint(Trouble.CHANGED, slot) for slot in absent]

    def _conclude(self, unused: Sequence[Slot]) -> Exception | None:
        """Reduce what is left, and show the results; return the error that is due."""
        complaints, self._complaints = self._complaints, []
        try:
            early_ns = self.clock.launch_ns
            for slot in unused:
                if slot.left > 0:
                    slot.contribute_unused()
            self._ledger.write(unused, bool(complaints))
            while self._next < len(self.buckets):
                self._start_next()
            self.reductions.wait(self.buckets, self._ledger)
            self.clock.launch_ns = early_ns
            self.clock.comm_end = Clock.now()
            self.times = self.clock.times()
            return self._settle(complaints)
        except CommError as error:
            if self.announcer is not None:
                self.announcer.failed(error)
            raise
        finally:
            self._reset()

    def _settle(self, complaints: Sequence[Complaint]) -> Exception | None:
        """Show the results, learn from the first backward; return the error that is due."""
        plain = self.reductions.averages and self._ledger.all_used()
        used = None if plain else self._ledger.used()
        for slot in self.slots():
            used_somewhere = used is None or used[slot.number]
            slot.settle(used_somewhere)
            if used_somewhere and not slot.used and not slot.parameter.requires_grad:
                self._complaints.append(Complaint(Trouble.FROZEN, slot))  # told in the next step
            slot.used = False
        self.num_reduced += 1
        if self._ledger.trouble():
            mine = self.reductions.take_hook_error()
            broken = [] if mine is None else [Complaint(Trouble.HOOK)]
            told = verdict(self.group, [*complaints, *broken], self.parameter_names)
            return mine or told
        self._learn()
        return None

    def _learn(self) -> None:
        """Take from a good backward what the later ones can rely on."""
        if self.ready_order:
            self._probe = self._slots[self.ready_order[0]]
        self._learn_order()
        if self._counting and self.ready_order:
            self._counting = False
            for slot in self._slots:
                slot.expected -= slot.left
            for bucket in self.buckets:
                bucket.expect()

    def shadow(self) -> None:
        """Take part in the reductions of the other ranks' backward, and add nothing to them.

        For a rank whose inputs have ended (`Join`). Its parameters get the others' gradients.

        Collective: where the other ranks of the group run a synchronised backward.
        """
        with self._lock:
            self._reset()
            self._rebuild()
            self._armed, self.ready_order = False, []
            error = None
            try:
                self._ledger.write_nothing()
                for bucket in self.buckets:
                    for slot in bucket.slots:
                        slot.contribute_nothing()
                    self.reductions.start(bucket, self.buckets)
                self.reductions.wait(self.buckets, self._ledger)
                error = self._settle(())
            finally:
                self._reset()
            if error is not None:
                raise error

    def _abandon(self) -> None:
        """Make up for a backward that ended with an exception: the other ranks wait for this one.

        Collective: while they are at the end of that backward. They get an error; this rank's
        program has had its own.
        """
        self.clock.backward_end = Clock.now()
        self._complaints.append(Complaint(Trouble.BROKEN))
        cleared = [slot.parameter for slot in self.slots() if slot.parameter.grad is None]
        error = self._conclude([slot for slot in self.slots() if not slot.used])
        for parameter in cleared:
            parameter.grad = None
        if error is not None:
            raise error

    def _reset(self) -> None:
        self._syncing, self._next = False, 0
        for slot in self._slots:
            slot.left = slot.expected
        for bucket in self.buckets:
            bucket.reset()
