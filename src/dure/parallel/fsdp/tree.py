"""A step of a tree of sharded modules: forward, backward, and the end of backward.

    forward  of the root: begin reading   module: unshard, compute, reshard        root: done
    backward                              module: unshard, compute, reduce, reshard
    end of backward: finish reductions, end reading

Each `fully_shard` call has an `FSDPState`. The states of nested modules form a *tree*, known from
its first forward on, whose outermost module is the root. Hooks (hooks.py) call its methods; the
tree's `TrainingState` says which may come next.

Unsharded parameters are kept after forward if a backward could begin unseen (*gathered*, and the
outputs have parts of unknown classes, or no tensor that a gradient arrives at). A backward with
``retain_graph=True`` keeps what was kept since forward. A backward with ``create_graph=True`` keeps
all unsharded parameters, because its new graph reads them, until a backward without it.

All ranks must unshard and reduce in one order, that of the first step (`ExecutionOrder`). A rank
that does not call a module, because its batch has nothing for it, joins the module's collectives
before it starts those of the next one, and contributes zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

from dure.comm import profiling
from dure.comm.profiling import UNRECORDED, profiler, recorded
from dure.errors import Desync, ModuleError, PeerLost, UsageError
from dure.parallel.fsdp.backward import Backward
from dure.parallel.fsdp.group import ParameterGroup, deliver
from dure.parallel.fsdp.order import ExecutionOrder
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.state import FSDPState, state_of, states_within
from dure.parallel.fsdp.states import TRAINING_TRANSITIONS, TrainingState, changed
from dure.parallel.fsdp.streams import SideStreams
from dure.training import autograd_hooks
from dure.training.epochs import ModelEpochs
from dure.training.module_times import ModuleClock, now
from dure.training.uninitialized import check_has_memory, check_initialized

__all__ = ["Tree"]

_MOST_REDUCTIONS = 2
"""How many groups' gradients are reduced at the same time."""


class Tree:
    """The states of nested modules, and the step that they are in.

    Attributes:
        root: The outermost state.
        states: All states.
        training_state: Its place in the step.
        clock: Measures what a step waits for.
        epochs: Of ranks that share the tree's parameters.
        entry: The outermost module of the forward that runs.
        keeps_unsharded: Unsharded parameters are kept, because a graph that autograd has built
            (``create_graph=True``) reads them.
    """

    def __init__(self, root: FSDPState) -> None:
        self.root, self.states = root, states_within(root.modules)
        for state in self.states:
            if state.tree is not None:  # the root of a smaller tree, which was called by itself
                state.tree.epochs.end_read(together=False)
            state.tree = self
        self._name_parameters(root)
        self.training_state = TrainingState.IDLE
        self.clock = ModuleClock()
        self.epochs = ModelEpochs()
        self.entry: nn.Module | None = None
        self.keeps_unsharded = False
        self._last_entry = root.modules[0]
        self._forward_orders: dict[nn.Module, ExecutionOrder] = {}
        self._backward_orders: dict[nn.Module, tuple[ExecutionOrder, ExecutionOrder]] = {}
        self._forward_order: ExecutionOrder | None = None
        self._backward: Backward | None = None
        self._reducing: deque[tuple[FSDPState, ParameterGroup]] = deque()
        self._reduced_in: set[SideStreams] = set()
        self._unsharded_since_forward: set[FSDPState] = set()

    def _name_parameters(self, root: FSDPState) -> None:
        paths = {inner: path for m in root.modules for path, inner in m.named_modules()}
        for state in self.states:
            state.name = paths.get(state.modules[0]) or "(root)"
            for group in state.groups:
                for parameter in group.parameters:
                    module, name = parameter.places[0]
                    path = paths.get(module)
                    parameter.name = f"{path}.{name}" if path else name

    def _change(self, new: TrainingState) -> None:
        old = self.training_state
        self.training_state = changed(old, new, TRAINING_TRANSITIONS, self.root.name)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._backward is not None

    @property
    def checks_gradients(self) -> bool:
        """Whether each gradient of a parameter must be checked; see `gradient_accumulated`."""
        return self._backward is None or self._backward.checks_gradients

    @property
    def groups(self) -> Iterator[ParameterGroup]:
        """All groups of the states."""
        return (group for state in self.states for group in state.groups)

    def orders(self) -> tuple[Sequence[FSDPState], Sequence[FSDPState]]:
        """Return the orders in which forward and backward unshard; empty if not recorded yet."""
        forwards = (o.sequence for o in self._forward_orders.values() if o.is_recorded)
        backwards = (o.sequence for o, _ in self._backward_orders.values() if o.is_recorded)
        return next(forwards, []), next(backwards, [])

    @contextmanager
    def explaining_errors(self, state: FSDPState | None = None) -> Iterator[None]:
        """Have errors name the module, and report what the death of a rank has left."""
        try:
            yield
        except Desync as error:
            name = (state or self.root).name
            if error.rank is not None and error.rank in error.calls:
                error.calls[error.rank] += f", for the module {name}"
            error.advise(
                f"Here parameters of the module {name} were asked for. Ranks that have no more to "
                "compute follow the others in `with fsdp.follow(model):`, or by fsdp.join_step."
            )
            raise
        except PeerLost as error:
            for group in self.groups:
                group.strategy.annotate(error)
            raise

    # ---------------------------------------------------------------- forward

    def pre_forward(self, state: FSDPState, module: nn.Module) -> None:
        """Unshard a module whose forward begins; the outermost module's forward begins a step."""
        if self.entry is None:
            if self._backward is not None:  # it raised, so autograd has not reported its end
                self.reset()
            record = profiler._is_profiler_enabled and profiling.step("FSDP::root_pre_forward")
            with record or UNRECORDED:
                order = self._forward_orders.setdefault(module, ExecutionOrder())
                self._forward_order = self._begin_step(order)
            self._change(TrainingState.FORWARD)
            self.entry = self._last_entry = module
        assert self._forward_order is not None
        self._join(self._forward_order.skipped(state))
        state.unshard()
        state.wait_for_unshard()
        for each in state.forward_prefetch or self._forward_order.upcoming():
            each.unshard()

    def _join(self, skipped: Sequence[FSDPState]) -> None:
        """Join the unshards of other ranks, except those not needed since forward."""
        for state in skipped:
            if state not in self._unsharded_since_forward:
                state.join_unshard()

    def _check_usable(self) -> None:
        if not all(state.is_checked for state in self.states):
            for state in self.states:
                state.check_resident()
            groups = [group for state in self.states for group in state.groups]
            managed = {getattr(*p.places[0], None) for group in groups for p in group.parameters}
            check_has_memory(self.root.modules, managed)
            check_initialized(self.root.modules)
            for state in self.states:
                state.is_checked = True

    def _begin_step(self, order: ExecutionOrder) -> ExecutionOrder:
        """Begin a step: all ranks read what was written before it."""
        for group in self.groups:
            group.check_versions()
        self.epochs.end_read(together=False)  # ranks no longer wait for what earlier forwards read
        self._check_usable()
        for state in self.states:
            for group in state.groups:
                if group.adopt():
                    self.keeps_unsharded = state.waits_for_backward = False
                group.publish()
        self.clock.begin_forward()
        self._begin_read()
        if self.training_state is TrainingState.UNSHARD:
            self._change(TrainingState.IDLE)
        self._unsharded_since_forward = set()
        order.begin()
        return order

    def _begin_read(self) -> list[FSDPParameter]:
        """Wait until all ranks read what they share; return what was written since."""
        begin = now()
        written: list[FSDPParameter] = []
        for group in self.groups:
            written += group.strategy.begin_read(self.epochs)
        self.clock.waited_for_ranks(begin)
        return written

    def forward_raised(self, state: FSDPState) -> None:
        """Clean up after a forward that raised; one around it may catch the error."""
        state.running = max(0, state.running - 1)
        if state.running:
            return  # the module was called recursively
        if self.entry is None or self.entry in state.modules:
            self.reset()
        else:
            state.to_run.clear()
            state.reshard_after()

    def post_forward(self, module: nn.Module) -> None:
        """End the step's forward, if `module` is the one that began it."""
        if self.entry is not module:
            return
        assert self._forward_order is not None
        if self._backward is not None and self._backward.has_failed:  # called by this forward
            self._drop_backward()
        self._change(TrainingState.IDLE)
        self.entry = None
        for each in self.states:
            if each.to_run:  # forward has called some modules of a list
                each.to_run.clear()
                each.reshard_after()
        self._join(self._forward_order.end())
        for group in self.groups:
            group.strategy.check_unwritten()
            group.record_versions()
        self._release_shards()
        if not torch.is_grad_enabled():
            self.epochs.end_read(together=True)

    # ---------------------------------------------------------------- between steps

    def before_unshard(self, state: FSDPState) -> None:
        """Prepare for the program's `unshard`: between steps, see what all ranks have written."""
        if self.training_state not in (TrainingState.IDLE, TrainingState.UNSHARD):
            for group in state.groups:
                group.adopt_replaced()
            return
        left = [group for group in self.groups if group.check_versions()]
        if self.training_state is TrainingState.IDLE:
            self.epochs.end_read(together=False)  # of a forward without a backward, say
        for group in state.groups:
            if group.free_stale():
                state.waits_for_backward = False
            group.adopt_replaced()
            group.strategy.gather_after_writes()
        if not all(group.strategy.is_current for group in state.groups):
            for group in self.groups:
                if not group.strategy.is_current:
                    group.adopt_replaced()
                    group.publish()
            self._begin_read()
            if self.training_state is TrainingState.IDLE:
                self._change(TrainingState.UNSHARD)
        for group in left:
            group.record_versions()  # `begin_read` has increased versions

    def _release_shards(self) -> None:
        """Let the program write shards that are in the host's memory."""
        for group in self.groups:
            group.strategy.release_shards()

    def after_reshard(self) -> None:
        """End reading after the program's `reshard` of the last module that it had unsharded."""
        is_unsharded = any(group.is_unsharded for group in self.groups)
        if self.training_state is TrainingState.UNSHARD and not is_unsharded:
            self._change(TrainingState.IDLE)
            self.epochs.end_read(together=False)
        self._release_shards()

    # ---------------------------------------------------------------- backward

    def pre_backward(self, state: FSDPState, entry: nn.Module) -> None:
        """Unshard a module whose backward begins, or whose forward is recomputed in backward.

        The backward follows the orders that belong to `entry`, the outermost module of its forward:
        on another rank, or in another step, it may begin at a different submodule.
        """
        backward = self._running_backward()
        if backward is None:
            backward, _ = self._follow_autograd(entry)
        if state.is_sharded and state.unshard_in_backward:
            self._join(backward.unshard_order.skipped(state))
            state.unshard()
            state.wait_for_unshard()
            for each in state.backward_prefetch or backward.unshard_order.upcoming():
                each.unshard()
        state.in_backward = True

    def gradient_accumulated(self, state: FSDPState, parameter: FSDPParameter) -> None:
        """Note that a parameter has its gradient; usually its module is known to be in backward.

        Raises:
            ModuleError: The gradient was computed from a value that was written after forward; or
                it has a history, which would be lost.
        """
        backward = self._running_backward()
        if backward is None:
            backward, written = self._follow_autograd(self._last_entry)
            backward.stale = set(written)
        for each in backward.stale:
            if each is parameter or not each.is_trained:
                raise _stale(each)
        if torch.is_grad_enabled() and parameter.gradient_has_history:
            raise _history(parameter)
        state.in_backward = True

    def _running_backward(self) -> Backward | None:
        """Return the backward that runs; drop one that has raised."""
        if self._backward is not None and self._backward.has_failed:
            if self.entry is None:
                self.reset()
            else:
                self._drop_backward()
        return self._backward

    def _follow_autograd(self, entry: nn.Module) -> tuple[Backward, list[FSDPParameter]]:
        """Begin the backward that autograd runs; also return what was written before it."""
        orders = self._backward_orders.setdefault(entry, (ExecutionOrder(), ExecutionOrder()))
        backward, written = self._begin_backward(orders)
        backward.keeps_graph = autograd_hooks.keeps_graph()
        backward.makes_graph = backward.keeps_graph and torch.is_grad_enabled()
        self.keeps_unsharded |= backward.makes_graph
        autograd_hooks.at_end_else(self._end_backward, lambda: self._fail(backward))
        return backward, written

    def _fail(self, backward: Backward) -> None:
        """Note that a backward has raised; let modules have the shards, for their `zero_grad`.

        Within a forward modules are left as they are, because it may catch the error and continue.
        """
        backward.has_failed = True
        if self.entry is not None:
            return
        for state in self.states:
            if not state.running:
                for parameter in state.parameters:
                    parameter.to_sharded(keeps_assigned=False)

    def _begin_backward(
        self, orders: tuple[ExecutionOrder, ExecutionOrder]
    ) -> tuple[Backward, list[FSDPParameter]]:
        for group in self.groups:
            group.check_versions()
        in_forward = self.training_state is TrainingState.FORWARD
        self._change(TrainingState.BACKWARD_IN_FORWARD if in_forward else TrainingState.BACKWARD)
        self._backward = Backward(*orders)
        self._unsharded_since_forward = {each for each in self.states if not each.is_sharded}
        for order in orders:
            order.begin()
        self.clock.begin_backward()
        return self._backward, self._begin_read()

    def post_backward(self, state: FSDPState) -> None:
        """Reduce the gradients of a module whose backward has ended."""
        assert self._backward is not None
        with torch.no_grad():
            for each in (*self._backward.reduce_order.skipped(state), state):
                self._begin_reduce(each)

    def _begin_reduce(self, state: FSDPState) -> None:
        """Start to reduce a module's gradients, and finish reductions that started long before.

        So flat copies of gradients do not pile up until backward ends. An earlier one is freed
        first, so that the next one gets its memory.
        """
        while any(group.reduction.is_begun for group in state.groups):  # earlier in this backward
            self._finish_reduce()
        while len(self._reducing) >= _MOST_REDUCTIONS:
            self._finish_reduce()
        begin = now()
        state.begin_reduce()
        self._reshard_after_backward(state, keeps=state.hides_backward)
        reducing = [(state, g) for g in state.groups if g.reduction.is_begun]
        num_bytes = sum(g.trained_bytes for _, g in reducing)
        if num_bytes:
            group = reducing[0][1].reduction.group
            self.clock.reduction_started(state.name, begin, group, num_bytes)
        self._reducing += reducing
        while len(self._reducing) > _MOST_REDUCTIONS:
            self._finish_reduce()

    def _finish_reduce(self) -> None:
        state, group = self._reducing.popleft()
        begin = now()
        with state.record("FSDP::post_backward_rs_wait"):
            deliveries = group.finish_reduce()
        if group.reduction.streams is not None:
            self._reduced_in.add(group.reduction.streams)
        if self._backward is not None:
            self._backward.deliveries += deliveries
        self.clock.reduced(state.name, begin)

    def _reshard_after_backward(self, state: FSDPState, keeps: bool) -> None:
        """Reshard a module; keep the memory of its unsharded parameters if they are still read."""
        if state.running or not state.reshard_after_backward:
            return  # a forward called autograd, and has not ended; or the program said so
        backward = self._backward
        if backward is not None:
            keeps |= backward.keeps_graph and state.waits_for_backward
        reshards = profiler._is_profiler_enabled and any(g.is_unsharded for g in state.groups)
        with state.record("FSDP::post_backward_reshard", reshards):
            state.reshard(keeps=keeps or self.keeps_unsharded)

    @recorded("FSDP::root_post_backward_callback")
    def _end_backward(self) -> None:
        """Finish when autograd has ended: reduce what is left, and wait for all reductions."""
        backward = self._backward
        if backward is not None:
            try:
                with self.explaining_errors(), torch.no_grad():
                    self._finish(backward)
            except ModuleError:
                self.reset()
                raise
            except BaseException:  # a rank died, or a hook raised
                self._fail(backward)
                raise

    def _finish(self, backward: Backward) -> None:
        for state in reversed(self.states):
            if state.in_backward:
                self.post_backward(state)
        self._join(backward.unshard_order.end())
        for state in backward.reduce_order.end():
            self._begin_reduce(state)
        self.clock.end_compute()
        while self._reducing:
            self._finish_reduce()
        while self._reduced_in:
            self._reduced_in.pop().wait_for_reduced()
        for group in self.groups:
            group.add_arrived()
        deliver(backward.deliveries)
        self.keeps_unsharded = backward.makes_graph or (
            self.keeps_unsharded and backward.keeps_graph
        )
        for state in self.states:
            self._reshard_after_backward(state, keeps=False)
            state.waits_for_backward &= backward.keeps_graph
            for group in state.groups:
                group.strategy.check_unwritten()
        self._release_shards()
        self._end_training_backward()
        if self.entry is None:  # else a forward has called autograd, and reads further
            begin = now()
            self.epochs.end_read(together=True)
            if backward.keeps_graph:
                self._begin_read()
            self.clock.waited_for_ranks(begin)
        group = next(self.groups, None)
        if group is not None:
            self.clock.end_backward(group.reduction.axes.shard_group)

    def _end_training_backward(self) -> None:
        """Forget the backward: the forward that called it continues, or the tree is idle."""
        if self._backward is not None:
            in_forward = self.training_state is TrainingState.BACKWARD_IN_FORWARD
            self._change(TrainingState.FORWARD if in_forward else TrainingState.IDLE)
            self._backward = None

    # ---------------------------------------------------------------- steps of other ranks

    def join_step(self) -> None:
        """Join a forward of the root and, with gradients enabled, its backward."""
        modules = self.root.modules
        forwards = [self._forward_orders[m] for m in modules if m in self._forward_orders]
        backward = next(
            (self._backward_orders[m] for m in modules if m in self._backward_orders), None
        )
        training = torch.is_grad_enabled()
        if not forwards or (training and backward is None):
            raise UsageError(
                "the first step needs a batch on every rank: others follow its order of modules",
                op="join_step",
                seen=f"no {'backward' if forwards else 'forward'} of {type(modules[0]).__name__} "
                "yet",
            )
        self._running_backward()
        with self.explaining_errors():
            for forward in forwards:
                self._join(self._begin_step(forward).end())
            if training and backward is not None:
                with torch.no_grad():
                    self._finish(self._begin_backward(backward)[0])
            else:
                self._release_shards()
                self.epochs.end_read(together=True)

    def join_forward(self, entry: nn.Module) -> None:
        """Join a forward of other ranks, without gradients, that begins with `entry`."""
        order = self._forward_orders.setdefault(entry, ExecutionOrder())
        with self.explaining_errors(state_of(entry)), torch.no_grad():
            self._begin_step(order)
            self._join(order.end() if order.is_recorded else ())
            self._release_shards()
            self.epochs.end_read(together=True)

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that backwards without `sync` have accumulated unsharded."""
        groups = [group for state in self.states for group in state.groups]
        syncs = [group.sync for group in groups]
        self._running_backward()
        for group in groups:
            group.sync = True
        try:
            with self.explaining_errors(), torch.no_grad():
                backward, _ = self._begin_backward((ExecutionOrder(), ExecutionOrder()))
                for state in self.states:
                    state.in_backward = True
                self._finish(backward)
        finally:
            for group, sync in zip(groups, syncs, strict=True):
                group.sync = sync

    # ---------------------------------------------------------------- failed steps

    def reset(self) -> None:
        """End a step that failed: reshard all modules, and drop the step's gradients."""
        self._drop_backward()
        if self.training_state is not TrainingState.IDLE:
            self._change(TrainingState.IDLE)
        self.entry, self._forward_order = None, None
        self.keeps_unsharded = False
        self.clock.reset()
        for state in self.states:
            state.waits_for_backward = False
            state.running = 0
            state.to_run.clear()
        for group in self.groups:
            with suppress(ModuleError):  # a write of the program; the first error is reported
                group.reshard()
        self._release_shards()
        self.epochs.end_read(together=False)

    def _drop_backward(self) -> None:
        """Drop a backward that failed, and its gradients."""
        self._end_training_backward()
        self._reducing.clear()
        for state in self.states:
            state.in_backward = False
        for group in self.groups:
            group.reset()


def _stale(parameter: FSDPParameter) -> ModuleError:
    return ModuleError(
        "a sharded parameter was written between forward and backward",
        op="FSDP backward",
        parameters=(parameter.name,),
        seen=f"{parameter.name}: its gradient would be that of another value than forward used",
        fix="Write parameters after backward; or run forward again.",
    )


def _history(parameter: FSDPParameter) -> ModuleError:
    return ModuleError(
        "gradients of sharded parameters cannot be differentiated",
        op="FSDP backward",
        parameters=(parameter.name,),
        seen="backward(create_graph=True)",
        fix="For a gradient penalty, use torch.autograd.grad(outputs, inputs, create_graph=True) "
        "and then backward() of the penalty.",
    )
