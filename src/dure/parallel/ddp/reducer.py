"""The reducer: averages gradients over the ranks while backward computes the next ones.

One backward with reduction:

1. *begin*: the first sign of a backward that belongs to a synchronised forward (a gradient arrives
   at an output of the module, or at a parameter) asks autograd to call *finish* at its end.
2. *on_gradient*: each time a parameter's gradient has been accumulated it is moved to its slot, and
   its bucket owes one less. When a bucket owes nothing, and all buckets before it have been
   started, its reduction is started too. It runs beside the rest of backward.
3. *finish*: buckets that still owe gradients are completed with what is there (zeros for a
   parameter that got no gradient) and started; then the rank waits for all of them. The last
   bucket is left for here: it is complete when backward has nothing more to compute, and if no
   other is under way it is reduced by this thread, without waking one for it.

A rank whose loss does not depend on some parameter therefore still takes part in every reduction,
and no rank ever waits for one that gave up. The flags of each bucket (see "Layout" in buckets.py)
tell all ranks alike who lacked what: unless unused parameters are expected, all of them raise the
same error, at the same step, with the parameters' names.

A backward without synchronisation (`no_sync`) only moves gradients to their slots; the next
synchronised one reduces the sums.

The group is kept here and not looked up: autograd may call from threads that have no world.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.ops import ReduceOp
from dure.data.nests import tensors_of
from dure.errors import CommError, ModuleError
from dure.parallel.ddp.bucketing import GradientSize, plan_buckets
from dure.parallel.ddp.buckets import Bucket, GradBucket, NamedParameter, Slot, make_bucket
from dure.parallel.ddp.casting import CastSlot
from dure.parallel.ddp.telling import tell_step
from dure.parallel.ddp.timing import Clock, StepTimes
from dure.parallel.ddp.verdicts import missing_gradients
from dure.trace import spans

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.joining import Announcer

__all__ = ["CommHook", "Reducer", "ReducerOptions"]

CommHook = Callable[[Any, GradBucket], torch.futures.Future[Any]]
"""Any: the hook's own state, and what its future holds (a tensor, or a list of one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How a reducer buckets, and what it expects.

    Attributes:
        cap_bytes: A bucket is closed when it holds at least this much.
        first_cap_bytes: The same for the first bucket.
        allow_unused: A parameter without a gradient is no error.
        reduce_dtype: In which real gradients are reduced; their own by default.
    """

    cap_bytes: int
    first_cap_bytes: int
    allow_unused: bool
    reduce_dtype: torch.dtype | None = None


class Reducer:
    """Averages the gradients of a module's parameters over a group; see the module's text.

    Threads: autograd may call from any of its threads, several at once; a lock makes each gradient
    one step. `prepare` is called by the thread that runs forward.

    Attributes:
        buckets: In the order in which they are reduced.
        times: What the last synchronised step took.
        num_reduced: Completed backwards with reduction.
        awaited_too: What else the end of the next backward waits for (Any: nobody looks at it).
        ready_order: Names of parameters in the order their gradients came in the last of these.
        divisor: What sums of gradients are divided by; None is the number of ranks.
        remove_hooks: Takes the parameters' hooks away: their gradients are no longer averaged.
        announcer: Tells a `Join` of each backward, and knows the divisor.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[NamedParameter], options: ReducerOptions
    ) -> None:
        self.group, self.options = group, options
        self.allow_unused = options.allow_unused
        self.buckets = self._allocate(parameters)
        self.times = StepTimes()
        self.clock = Clock()
        self.num_reduced = 0
        self.ready_order: list[str] = []
        self.comm_hook: tuple[object, CommHook] | None = None
        self.divisor: int | None = None
        self.announcer: Announcer | None = None
        self.on_step: Callable[[int, Clock], None] | None = None
        self.awaited_too: list[torch.futures.Future[Any]] = []
        self.parameter_names = [p.name for p in parameters]
        self._lock = threading.RLock()
        self._armed = False  # the last forward was synchronised and has had no backward yet
        self._syncing = False  # between begin and finish
        self._next = 0  # the next bucket to start
        handles = [self._watch_parameter(slot) for slot in self.slots()]
        self.remove_hooks = weakref.finalize(self, _remove_all, handles)
        self.remove_hooks.atexit = False

    def slots(self) -> Iterator[Slot]:
        """Go through the slots of all buckets."""
        return (slot for bucket in self.buckets for slot in bucket.slots)

    @property
    def hook_name(self) -> str:
        """Name of the communication hook; empty without one."""
        return "" if self.comm_hook is None else getattr(self.comm_hook[1], "__qualname__", "")

    def _allocate(self, parameters: Sequence[NamedParameter]) -> list[Bucket]:
        sizes = [
            GradientSize(
                num_bytes=p.parameter.numel() * self._dtype_of(p).itemsize,
                kind=(self._dtype_of(p), p.parameter.dtype, p.parameter.device),
            )
            for p in parameters
        ]
        plan = plan_buckets(
            sizes,
            cap_bytes=self.options.cap_bytes,
            first_cap_bytes=self.options.first_cap_bytes,
        )
        return [
            self._make_bucket(index, [parameters[i] for i in members])
            for index, members in enumerate(plan)
        ]

    def _make_bucket(self, index: int, members: Sequence[NamedParameter]) -> Bucket:
        dtype = self._dtype_of(members[0])
        cast = dtype != members[0].parameter.dtype
        return make_bucket(index, members, self._empty, dtype, CastSlot if cast else Slot)

    def _dtype_of(self, member: NamedParameter) -> torch.dtype:
        """Return the dtype in which a gradient is reduced."""
        own, wanted = member.parameter.dtype, self.options.reduce_dtype
        return own if wanted is None or not own.is_floating_point else wanted

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self.group.shared_empty(numel, dtype=dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _watch_parameter(self, slot: Slot) -> torch.utils.hooks.RemovableHandle:
        reducer = weakref.ref(self)

        def gradient_accumulated(_: torch.Tensor) -> None:
            me = reducer()
            if me is not None:
                me.on_gradient(slot)

        return slot.parameter.register_post_accumulate_grad_hook(gradient_accumulated)

    # ---------------------------------------------------------------- forward

    def prepare(self, sync: bool) -> None:
        """Begin a forward; `sync` tells whether the backward after it shall reduce."""
        with self._lock:
            if self._syncing and not _in_backward():
                self._reset()  # a backward that raised before its end
            self._armed = sync
            if sync:
                self.clock.forward = Clock.now()

    def watch_outputs(self, outputs: object) -> None:
        """Have the backward of `outputs` reduce, even one that reaches no parameter."""
        for tensor in tensors_of(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)

    def _on_output(self, _: torch.Tensor) -> None:
        with self._lock:
            self._begin()

    # ---------------------------------------------------------------- backward

    def _begin(self) -> None:
        """Ask for `finish` at the end of the backward that is running; once."""
        if self._syncing:
            return
        if self.announcer is not None:
            self.divisor = self.announcer.backward()
        self._syncing, self._armed, self._next = True, False, 0
        self.ready_order = []
        self.clock.start_backward()
        queue_callback: Callable[[Callable[[], None]], None]
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore
        queue_callback(self._finish)

    def on_gradient(self, slot: Slot) -> None:
        """Take in a gradient that autograd has just accumulated."""
        with self._lock:
            bucket = self.buckets[slot.bucket_index]
            if self._syncing and bucket.index < self._next:
                raise ModuleError(
                    "a gradient changed after its bucket was reduced",
                    parameters=(slot.name,),
                    seen=f"the parameter {slot.name} got gradients more than once in one backward",
                    fix="Reentrant checkpointing of shared parameters does this; use the "
                    "checkpoint function with use_reentrant=False.",
                )
            if self._armed:
                self._begin()
            if slot.parameter.grad is None:
                return  # autograd came by with nothing; `finish` sees to the slot
            slot.adopt()
            slot.used = True
            if not self._syncing or slot.ready:
                return
            slot.ready = True
            self.ready_order.append(slot.name)
            bucket.pending -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
                self._next += 1
                if self._next < len(self.buckets):
                    self._start(self.buckets[self._next - 1])

    def _start(self, bucket: Bucket, async_op: bool = True) -> None:
        """Start the reduction of `bucket`; where not `async_op`, it may end here too."""
        start = Clock.now()
        bucket.write_flags()
        self._reduce(bucket, async_op)
        self.clock.launched(start, bucket.num_bytes)

    def _reduce(self, bucket: Bucket, async_op: bool = True) -> None:
        """Start the reduction of `bucket`, which is filled."""
        if self.comm_hook is None:
            op = ReduceOp.AVG if self.divisor is None else ReduceOp.SUM
            bucket.work = self.group.all_reduce(bucket.flat, op, async_op=async_op)
        else:
            state, hook = self.comm_hook
            bucket.result = hook(state, GradBucket(bucket, bucket.index == len(self.buckets) - 1))
            bucket.work = self.group.all_reduce(bucket.flags, ReduceOp.AVG, async_op=True)

    def _finish(self) -> None:
        """End a backward: start what is left, wait for all, and show the results."""
        with self._lock:
            self.clock.backward_end = Clock.now()
            unused = [slot for slot in self.slots() if not slot.used]
            try:
                self._complete(unused)
                lacking = [slot for bucket in self.buckets for slot in bucket.settle()]
            except CommError as error:
                if self.announcer is not None:
                    self.announcer.failed(error)
                raise
            finally:
                self._reset()
            if self.on_step is not None:
                self.on_step(self.num_reduced, self.clock)
            if spans.listeners:
                tell_step(self)
            self.num_reduced += 1
            if lacking and not self.allow_unused:
                raise missing_gradients(self.group, lacking, unused)

    def _complete(self, unused: Sequence[Slot]) -> None:
        """Start the buckets that are not complete, and wait for all."""
        early_ns = self.clock.launch_ns
        for slot in unused:
            slot.contribute_unused()
        *others, last = self.buckets
        for bucket in others[self._next :]:
            self._start(bucket)
        self._next = len(self.buckets)
        self._start(last, async_op=any(map(_under_way, others)))
        self._wait()
        self.clock.launch_ns = early_ns
        self.clock.comm_end = Clock.now()
        self.times = self.clock.times()

    def _wait(self) -> None:
        """Wait for all buckets."""
        for bucket in self.buckets:
            _wait(bucket)
            if self.divisor is not None:
                # A hook divides by the number of ranks.
                by = self.divisor if self.comm_hook is None else self.divisor / self.group.size()
                bucket.buffer.div_(by)
        while self.awaited_too:
            self.awaited_too.pop().wait()

    def shadow(self) -> None:
        """Take part in the reductions of the other ranks' backward, and add nothing to them.

        For a rank whose inputs have ended (`Join`). Its parameters get the others' gradients.

        Collective: where the other ranks of the group run a synchronised backward.
        """
        with self._lock:
            self._reset()
            self._armed = False
            try:
                for bucket in self.buckets:
                    bucket.contribute_nothing()
                    self._reduce(bucket)
                self._wait()
                lacking = [slot for bucket in self.buckets for slot in bucket.settle()]
            finally:
                self._reset()
            self.num_reduced += 1
            if lacking and not self.allow_unused:
                raise missing_gradients(self.group, lacking, ())

    def _reset(self) -> None:
        self._syncing, self._next = False, 0
        for bucket in self.buckets:
            bucket.reset()
            for slot in bucket.slots:
                slot.ready = False


def _under_way(bucket: Bucket) -> bool:
    return bucket.work is not None and not bucket.work.is_completed()


def _wait(bucket: Bucket) -> None:
    """Wait for a bucket's reduction, and put the result of a hook in place."""
    if bucket.work is not None:
        bucket.work.wait()
    if bucket.result is None:
        return
    value: Any = bucket.result.wait()
    result: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    if result.data_ptr() != bucket.buffer.data_ptr() or not result.is_contiguous():
        with torch.no_grad():
            bucket.buffer.copy_(result.detach().reshape(-1))


def _remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _in_backward() -> bool:
    """Tell whether the calling thread is inside a backward (checkpoints run forward there)."""
    return torch._C._current_graph_task_id() >= 0  # pyright: ignore
