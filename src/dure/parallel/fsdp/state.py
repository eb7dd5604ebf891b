"""What happens around a sharded module's forward and backward.

    forward  of the root: enter        module: unshard, compute, reshard        root: done
    backward                           module: unshard, compute, reduce, reshard
    end of backward: finish reductions, leave

Each `fully_shard` call has an `FSDPState`. States of modules within one another form a *tree*,
known from its first forward on, whose outermost module is the root.

What happens to a module's state, and what it is noticed by:

    event                                    noticed by a hook on    then
    ---------------------------------------  ----------------------  ------------------------------
    forward begins                           the module              unshard
    forward ends                             the module              reshard, unless kept (below)
    a gradient of its outputs arrives        output tensors          in backward; unshard
    forward is run again (a checkpoint)      the module              in backward; unshard
    a gradient of a parameter is there       the unsharded           in backward
                                             parameter
    gradients of all its inputs are there    input tensors           reduce, reshard
    backward ends                            autograd                reduce if in backward, reshard

Hooks on outputs and inputs only say when it is early to gather and to reduce. *Whether* a module
takes part in a backward is known from its parameters' own gradients: a loss may be made of a tensor
that a module has kept, or returned in an object of any class. So what is *in backward* at the end
is reduced then, and no gradient is left over.

The wholes are kept after forward where a backward could not be seen in time (*gathered*, and the
outputs have parts of unknown classes, or no tensor that a gradient arrives at). What is kept from
forward to backward is kept by one with ``retain_graph=True``, too. One with ``create_graph=True``
keeps all wholes, as the graph that it has made reads them, until a backward without.

All ranks must gather and reduce in one order. It is that of the first step (`Order`). A rank that
does not call a module, as its batch has nothing for it, takes part in the module's gathers and
reductions when it comes to the next one, and adds zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from dure.comm import profiling
from dure.comm.call import NOTHING, about, subject_of
from dure.comm.profiling import UNRECORDED, profiler, recorded
from dure.comm.untraced import untraced
from dure.errors import Desync, DureError, ModuleError, PeerLost, UsageError
from dure.parallel.fsdp.backward import Backward
from dure.parallel.fsdp.group import ParameterGroup, deliver
from dure.parallel.fsdp.order import Order
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.policies import MixedPrecisionPolicy
from dure.training import autograd_hooks
from dure.training.module_times import ModuleClock, now
from dure.training.pytrees import cast_floats, has_unknown_parts, tensors_of
from dure.training.turns import TurnsOfModel
from dure.training.uninitialized import check_has_memory, check_initialized

__all__ = ["FSDPState", "Tree", "state_of", "states_in", "states_within"]

_subject = cache(subject_of)
_MOST_REDUCTIONS = 2
"""Groups whose gradients are reduced at once."""


class Tree:
    """The states of modules within one another, and where a step of them is.

    Attributes:
        root: The outermost one.
        states: All.
        clock: What a step waits for.
        turns: Of ranks that share its parameters.
        entry: The module whose forward runs, the outermost.
        keeps_unsharded: Wholes are kept: autograd has made a graph (``create_graph=True``) that
            reads them.
    """

    def __init__(self, root: FSDPState) -> None:
        self.root, self.states = root, states_within(root.modules)
        for state in self.states:
            if state.tree is not None:  # of a part of this one, which was called by itself
                state.tree.turns.leave(together=False)
            state.tree = self
        self._name_parameters(root)
        self.clock = ModuleClock()
        self.turns = TurnsOfModel()
        self.entry: nn.Module | None = None
        self.keeps_unsharded = False
        self._last_entry = root.modules[0]
        self._forwards: dict[nn.Module, Order] = {}
        self._backwards: dict[nn.Module, tuple[Order, Order]] = {}
        self._forward: Order | None = None
        self._backward: Backward | None = None
        self._reducing: deque[tuple[FSDPState, ParameterGroup]] = deque()
        self._kept: set[FSDPState] = set()
        self._shows = False  # an `unshard` of the program, between steps, has entered

    def _name_parameters(self, root: FSDPState) -> None:
        paths = {inner: path for m in root.modules for path, inner in m.named_modules()}
        for state in self.states:
            state.name = paths.get(state.modules[0]) or "(root)"
            for group in state.groups:
                for parameter in group.parameters:
                    module, name = parameter.places[0]
                    path = paths.get(module)
                    parameter.name = f"{path}.{name}" if path else name

    @property
    def in_backward(self) -> bool:
        """Whether one has begun and not ended."""
        return self._backward is not None

    @property
    def checks_gradients(self) -> bool:
        """Whether each gradient of a parameter is to be looked at; see `gradient_accumulated`."""
        return self._backward is None or self._backward.checks_gradients

    @property
    def groups(self) -> Iterator[ParameterGroup]:
        """All groups of the states."""
        return (group for state in self.states for group in state.groups)

    def orders(self) -> tuple[Sequence[FSDPState], Sequence[FSDPState]]:
        """Return in which order forward gathers, and backward; empty before that is known."""
        forward = next((o.sequence for o in self._forwards.values() if o.is_known), [])
        backward = next((o.sequence for o, _ in self._backwards.values() if o.is_known), [])
        return forward, backward

    @contextmanager
    def telling(self, state: FSDPState | None = None) -> Iterator[None]:
        """Have an error that a rank died say what it has left; other errors name the module."""
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
                group.strategy.tell(error)
            raise

    # ---------------------------------------------------------------- forward

    def begin_forward(self, state: FSDPState, module: nn.Module) -> None:
        """A module's forward begins; the outermost one's begins a step."""
        if self.entry is None:
            if self._backward is not None:  # which raised, so autograd has reported no end
                self.forget()
            if state.announce is not None:
                state.announce(module)
            record = profiler._is_profiler_enabled and profiling.step("FSDP::root_pre_forward")
            with record or UNRECORDED:
                self._forward = self._enter(self._forwards.setdefault(module, Order()))
            self.entry = self._last_entry = module
        assert self._forward is not None
        self._join(self._forward.skipped(state))
        self._gather(state, state.forward_prefetch or self._forward.coming())

    def _gather(self, state: FSDPState, ahead: Sequence[FSDPState]) -> None:
        """Let a module have its wholes; begin to gather what comes next."""
        state.unshard()
        state.show_wholes()
        for each in ahead:
            each.unshard()

    def _join(self, skipped: Sequence[FSDPState]) -> None:
        """Take part in what others gather: not, for backward, what all have kept since forward."""
        for state in skipped:
            if state not in self._kept:
                state.join_gather()

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

    def _enter(self, order: Order) -> Order:
        """Begin a step: what was written before is seen by all."""
        for group in self.groups:
            group.check_left()
        self.turns.leave(together=False)  # what an earlier forward reads is no longer awaited
        self._check_usable()
        for state in self.states:
            for group in state.groups:
                if group.adopt():
                    self.keeps_unsharded = state.waits_for_backward = False
                group.strategy.publish()
        self.clock.begin_forward()
        self._take_turn()
        self._shows = False
        self._kept = set()
        order.begin()
        return order

    def _take_turn(self) -> list[FSDPParameter]:
        """Wait until all ranks read what they share; return what was written since."""
        begin = now()
        written: list[FSDPParameter] = []
        for group in self.groups:
            written += group.strategy.enter(self.turns)
        self.clock.turn(begin)
        return written

    def forward_raised(self, state: FSDPState) -> None:
        """A module's forward was left by an exception, which a forward around it may catch."""
        state.running = max(0, state.running - 1)
        if state.running:
            return  # it was called by itself
        if self.entry is None or self.entry in state.modules:
            self.forget()
        else:
            state.to_run.clear()
            state.reshard_after()

    def end_forward(self, module: nn.Module) -> None:
        """A module's forward has ended."""
        if self.entry is not module:
            return
        assert self._forward is not None
        if self._backward is not None and self._backward.has_failed:  # which this forward called
            self._forget_backward()
        self.entry = None
        for each in self.states:
            if each.to_run:  # of a list of modules, forward has called some
                each.to_run.clear()
                each.reshard_after()
        self._join(self._forward.end())
        for group in self.groups:
            group.strategy.check_unwritten()
            group.leave()
        if not torch.is_grad_enabled():
            self.turns.leave(together=True)

    # ---------------------------------------------------------------- between steps

    def before_showing(self, state: FSDPState) -> None:
        """The program unshards a module: between steps, let it see what all ranks have written."""
        if self.entry is not None or self.in_backward:
            for group in state.groups:
                group.adopt_replaced()
            return
        left = [group for group in self.groups if group.check_left()]
        if not self._shows:  # a forward without a backward, say, may have left ranks reading
            self.turns.leave(together=False)
        for group in state.groups:
            if group.free_stale():
                state.waits_for_backward = False
            group.adopt_replaced()
        if not all(group.strategy.is_current for group in state.groups):
            for group in self.groups:
                if not group.strategy.is_current:
                    group.adopt_replaced()
                    group.strategy.publish()
            self._take_turn()
            self._shows = True
        for group in left:
            group.leave()  # `enter` has increased versions

    def after_showing(self) -> None:
        """The program has resharded a module: with the last one, others may write again."""
        is_over = self.entry is None and not self.in_backward
        if self._shows and is_over and not any(group.unsharded for group in self.groups):
            self._shows = False
            self.turns.leave(together=False)

    # ---------------------------------------------------------------- backward

    def begin_backward(self, state: FSDPState, entry: nn.Module) -> None:
        """A module's backward begins, or its forward is run again in backward.

        Its orders are those of backwards of `entry`, whose forward the backward goes back through:
        on another rank, or in another step, it may begin at another module within.
        """
        backward = self._running_backward()
        if backward is None:
            backward, _ = self._follow_autograd(entry)
        if state.is_sharded and state.unshard_in_backward:
            self._join(backward.gathers.skipped(state))
            self._gather(state, state.backward_prefetch or backward.gathers.coming())
        state.in_backward = True

    def gradient_accumulated(self, state: FSDPState, parameter: FSDPParameter) -> None:
        """A parameter's gradient is there; mostly its module's backward is known to run.

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
        """Return the backward that has begun; what another has left that raised is dropped."""
        if self._backward is not None and self._backward.has_failed:
            if self.entry is None:
                self.forget()
            else:
                self._forget_backward()
        return self._backward

    def _follow_autograd(self, entry: nn.Module) -> tuple[Backward, list[FSDPParameter]]:
        """Begin with autograd's running backward; return what was written before it, too."""
        orders = self._backwards.setdefault(entry, (Order(), Order()))
        backward, written = self._enter_backward(orders)
        backward.keeps_graph = autograd_hooks.keeps_graph()
        backward.makes_graph = backward.keeps_graph and torch.is_grad_enabled()
        self.keeps_unsharded |= backward.makes_graph
        autograd_hooks.at_end_else(self._end_backward, lambda: self._fail(backward))
        return backward, written

    def _fail(self, backward: Backward) -> None:
        """Note that a backward has raised; let modules have the shards, for their `zero_grad`.

        Not within a forward, which may catch the error and go on.
        """
        backward.has_failed = True
        if self.entry is not None:
            return
        for state in self.states:
            if not state.running:
                for parameter in state.parameters:
                    parameter.show_sharded()

    def _enter_backward(self, orders: tuple[Order, Order]) -> tuple[Backward, list[FSDPParameter]]:
        for group in self.groups:
            group.check_left()
        self._backward = Backward(*orders)
        self._kept = {state for state in self.states if not state.is_sharded}
        for order in orders:
            order.begin()
        self.clock.begin_backward()
        return self._backward, self._take_turn()

    def join_step(self) -> None:
        """Take part in a forward of the root and, with gradients on, in its backward."""
        modules = self.root.modules
        forwards = [self._forwards[m] for m in modules if m in self._forwards]
        backward = next((self._backwards[m] for m in modules if m in self._backwards), None)
        training = torch.is_grad_enabled()
        if not forwards or (training and backward is None):
            raise UsageError(
                "the first step needs a batch on every rank: others follow its order of modules",
                op="join_step",
                seen=f"no {'backward' if forwards else 'forward'} of {type(modules[0]).__name__} "
                "yet",
            )
        with self.telling():
            for forward in forwards:
                self._join(self._enter(forward).end())
            if training and backward is not None:
                with torch.no_grad():
                    self._finish(self._enter_backward(backward)[0])
            else:
                self.turns.leave(together=True)

    def reduce_kept(self) -> None:
        """Reduce the gradients that backwards without `sync` have kept whole."""
        groups = [group for state in self.states for group in state.groups]
        syncs = [group.sync for group in groups]
        for group in groups:
            group.sync = True
        try:
            with self.telling(), torch.no_grad():
                backward, _ = self._enter_backward((Order(), Order()))
                for state in self.states:
                    state.in_backward = True
                self._finish(backward)
        finally:
            for group, sync in zip(groups, syncs, strict=True):
                group.sync = sync

    def join_forward(self, entry: nn.Module) -> None:
        """Take part in a forward of other ranks, without gradients, which `entry` begins."""
        order = self._forwards.setdefault(entry, Order())
        with self.telling(state_of(entry)), torch.no_grad():
            self._enter(order)
            self._join(order.end() if order.is_known else ())
            self.turns.leave(together=True)

    def reduce(self, state: FSDPState) -> None:
        """A module's backward has ended."""
        assert self._backward is not None
        with torch.no_grad():
            for each in (*self._backward.reductions.skipped(state), state):
                self._begin_reduction(each)

    def _begin_reduction(self, state: FSDPState) -> None:
        """Begin to reduce a module's gradients; end what was begun long before it.

        So that flat copies of gradients do not pile up until backward ends.
        """
        while any(group.reduction.is_begun for group in state.groups):  # earlier in this backward
            self._finish_reduction()
        begin = now()
        state.end_backward()
        self._reshard_after_backward(state, keeps=state.hides_backward)
        reducing = [(state, g) for g in state.groups if g.reduction.is_begun]
        num_bytes = sum(g.trained_bytes for _, g in reducing)
        if num_bytes:
            group = reducing[0][1].reduction.group
            self.clock.reduction_started(state.name, begin, group, num_bytes)
        self._reducing += reducing
        while len(self._reducing) > _MOST_REDUCTIONS:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        state, group = self._reducing.popleft()
        begin = now()
        with state.step("FSDP::post_backward_rs_wait"):
            deliveries = group.finish_reduction()
        if self._backward is not None:
            self._backward.deliveries += deliveries
        self.clock.reduced(state.name, begin)

    def _reshard_after_backward(self, state: FSDPState, keeps: bool) -> None:
        """Let a module have its shards; free the wholes, unless `keeps`, or something reads on."""
        if state.running or not state.reshard_after_backward:
            return  # a forward called autograd, and is not at its end; or the program said so
        backward = self._backward
        if backward is not None:
            keeps |= backward.keeps_graph and state.waits_for_backward
        reshards = profiler._is_profiler_enabled and any(group.unsharded for group in state.groups)
        with state.step("FSDP::post_backward_reshard", reshards):
            state.reshard(keeps=keeps or self.keeps_unsharded)

    @recorded("FSDP::root_post_backward_callback")
    def _end_backward(self) -> None:
        """Autograd has ended: reduce what is left, and wait for all."""
        backward = self._backward
        if backward is not None:
            try:
                with self.telling(), torch.no_grad():
                    self._finish(backward)
            except ModuleError:
                self.forget()
                raise
            except BaseException:  # of a rank that died, or of a hook
                self._fail(backward)
                raise

    def _finish(self, backward: Backward) -> None:
        for state in reversed(self.states):
            if state.in_backward:
                self.reduce(state)
        self._join(backward.gathers.end())
        for state in backward.reductions.end():
            self._begin_reduction(state)
        self.clock.last_wait()
        while self._reducing:
            self._finish_reduction()
        deliver(backward.deliveries)
        self.keeps_unsharded = backward.makes_graph or (
            self.keeps_unsharded and backward.keeps_graph
        )
        for state in self.states:
            self._reshard_after_backward(state, keeps=False)
            state.waits_for_backward &= backward.keeps_graph
            for group in state.groups:
                group.strategy.check_unwritten()
        self._backward = None
        if self.entry is None:  # else a forward has called autograd, and reads on
            begin = now()
            self.turns.leave(together=True)
            if backward.keeps_graph:
                self._take_turn()
            self.clock.turn(begin)
        group = next(self.groups, None)
        if group is not None:
            self.clock.end_backward(group.reduction.axes.shard_group)

    def forget(self) -> None:
        """End a step that failed: reshard all, and drop its gradients."""
        self.entry, self._forward = None, None
        self.keeps_unsharded = False
        self.clock.forget()
        self._forget_backward()
        for state in self.states:
            state.waits_for_backward = False
            state.running = 0
            state.to_run.clear()
        for group in self.groups:
            with suppress(ModuleError):  # a write: what has raised is told
                group.reshard()
        self.turns.leave(together=False)

    def _forget_backward(self) -> None:
        """Drop a backward that failed, and its gradients."""
        self._backward = None
        self._reducing.clear()
        for state in self.states:
            state.in_backward = False
        for group in self.groups:
            group.forget()


class FSDPState:
    """Of one `fully_shard` call.

    Attributes:
        modules: Those that were given.
        groups: Their parameters.
        policy: Dtypes.
        reshard_after_forward: None: yes, but for the root.
        reshard_after_backward: Free the wholes when backward has ended.
        unshard_in_backward: Make them whole there; off where backward does not read them.
        forward_prefetch, backward_prefetch: States to gather ahead, where the user said so.
        in_backward: Its backward has begun and not ended.
        is_checked: Nothing is offloaded, on the meta device, or made by `to_empty` and not
            written.
        announce: Is called when a forward begins with this one; see `follow`.
        name: Path of its module in the root, for messages.
        is_offloaded: Shards have no values; see `offload`.
        to_run: Modules of the call that forward has not reached, where it has reached one.
        running: How many forwards of its modules run, within one another.
        hides_backward: It has had outputs whose backward would not be seen in time.
        waits_for_backward: Its wholes are kept since a forward, for its backward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules, self.groups, self.policy = tuple(modules), list(groups), policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.in_backward = self.hides_backward = self.waits_for_backward = False
        self.is_checked = False
        self.is_offloaded = False
        self.announce: Callable[[nn.Module], None] | None = None
        self.name = "(root)"
        self.to_run: set[nn.Module] = set()
        self.running = 0
        self.tree: Tree | None = None
        for group in self.groups:
            for parameter in group.parameters:
                parameter.on_gradient = self._gradient_accumulated
        for module in self.modules:
            module._dure_fsdp = self  # pyright: ignore
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, with_kwargs=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_loading)

    # ---------------------------------------------------------------- what groups do

    @property
    def parameters(self) -> Iterator[FSDPParameter]:
        """Those of all groups."""
        return (parameter for group in self.groups for parameter in group.parameters)

    @property
    def is_sharded(self) -> bool:
        """Whether modules have shards."""
        return any(not group.unsharded for group in self.groups)

    def step(self, name: str, happens: bool = True) -> AbstractContextManager[object]:
        """Return the record of a step of these modules, while one of torch's profilers runs.

        None where nothing `happens`, or no parameter is the module's own; as in torch.
        """
        if profiler._is_profiler_enabled and happens and self.groups:
            return profiling.step(name, self.name)
        return UNRECORDED

    def unshard(self) -> None:
        """Begin to make all parameters whole."""
        if self.is_sharded:
            begin = now()
            in_backward = self.tree is not None and self.tree.in_backward
            what = "gathered in backward" if in_backward else "gathered in forward"
            profiled = profiler._is_profiler_enabled
            begins = profiled and any(group.begins_gather for group in self.groups)
            with self.step("FSDP::all_gather", begins), self._comparing(what):
                begun = [group.unshard() for group in self.groups]
            if self.tree is not None:
                self.tree.clock.gather_started(self.name, begin, next(filter(None, begun), None))

    def show_wholes(self) -> None:
        """Let the modules have the wholes."""
        if self.is_sharded:
            begin = now()
            with self.step("FSDP::all_gather_copy_out"):
                for group in self.groups:
                    group.show_wholes()
            if self.tree is not None:
                self.tree.clock.gathered(self.name, begin)

    def reshard(self, keeps: bool = False) -> None:
        """Let the modules have the shards; free the wholes, unless `keeps`."""
        for group in self.groups:
            group.reshard(keeps=keeps)

    def reshard_after(self) -> None:
        """Let the modules have the shards when a forward has ended, if they are to have them."""
        training, frees = torch.is_grad_enabled(), self.reshard_after_forward
        if frees is None:
            frees = self.tree is None or self.tree.root is not self
        if training and (self.hides_backward or not frees):
            self.waits_for_backward = True
        if frees or not training:
            for group in self.groups:
                group.reshard(for_backward=training, keeps=self._is_read_later)

    @property
    def _is_read_later(self) -> bool:
        """Whether a backward will read the wholes which may not be seen before it does."""
        return self.waits_for_backward or (self.tree is not None and self.tree.keeps_unsharded)

    def join_gather(self) -> None:
        """Take part in a gather whose result this rank does not need."""
        if self.is_sharded:
            self.unshard()
            self.show_wholes()
            self.reshard_after()

    def end_backward(self) -> None:
        """Reduce the gradients."""
        with self.step("FSDP::post_backward_reduce"), self._comparing("reduced"):
            for group in self.groups:
                group.end_backward()
        self.in_backward = False

    @contextmanager
    def _comparing(self, what: str) -> Iterator[None]:
        """Have ranks compare which module they communicate for: others may have as many bytes."""
        about(_subject(f"{self.name}, {what}"))
        try:
            yield
        finally:
            about(NOTHING)

    def check_resident(self) -> None:
        """Raise a ModuleError if the model is offloaded."""
        if self.is_offloaded:
            raise ModuleError(
                "the model is offloaded",
                seen=type(self.modules[0]).__name__,
                fix="Call fsdp.onload(model) first.",
            )

    # ---------------------------------------------------------------- hooks

    @untraced
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather; cast inputs; watch for their gradients (Any: any inputs)."""
        tree = self.tree or Tree(self)
        with self.step("FSDP::pre_forward"):
            return self._begin_forward(tree, module, args, kwargs)

    def _begin_forward(
        self, tree: Tree, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        watches = True
        if autograd_hooks.in_backward():
            with tree.telling(self):
                tree.begin_backward(self, module)
        else:
            begins = not self.running and (self.is_sharded or not self.to_run)
            if begins:
                self.to_run.update(self.modules)
                with tree.telling(self):
                    tree.begin_forward(self, module)
            self.running += 1
            # Of a list, backward is over with the module that came first; not where each comes
            # first, as it is called by itself.
            watches = begins and (len(self.modules) == 1 or tree.entry is not module)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        watches &= torch.is_grad_enabled()
        if watches and any(t.requires_grad for t in tensors_of((args, kwargs))):
            args, kwargs = autograd_hooks.on_inputs((args, kwargs), self._after_backward)
        return args, kwargs

    @untraced
    def _after_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Free unsharded parameters; watch for gradients of the outputs (Any: any)."""
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        if autograd_hooks.in_backward():
            return output
        assert self.tree is not None
        with self.step("FSDP::post_forward"):
            self._end_forward(self.tree, module, (args, kwargs), output)
        return output

    def _end_forward(self, tree: Tree, module: nn.Module, inputs: Any, output: Any) -> None:
        self.to_run.discard(module)
        self.running = max(0, self.running - 1)
        if torch.is_grad_enabled():
            self._watch_outputs(output, inputs, tree.entry or module)
        if tree.entry is module and not self.running:
            self.to_run.clear()  # of a list of modules, called by themselves
        if not (self.to_run or self.running):
            try:
                self.reshard_after()
                with tree.telling(self):
                    tree.end_forward(module)
            except ModuleError:
                tree.forget()
                raise

    def _watch_outputs(self, output: Any, inputs: Any, entry: nn.Module) -> None:
        """Watch for gradients of the outputs; note if one may arrive unseen."""
        count = autograd_hooks.on_outputs(
            output, lambda _: self._before_backward(entry), inputs=inputs
        )
        frees = any(group.strategy.frees for group in self.groups)
        if frees and (count == 0 or has_unknown_parts(output)) and self._may_have_graph(inputs):
            self.hides_backward = True

    def _may_have_graph(self, inputs: Any) -> bool:
        trained = any(p.is_trained for group in self.groups for p in group.parameters)
        return trained or any(t.requires_grad for t in tensors_of(inputs))

    def forward_raised(self) -> None:
        """A forward of one of the modules was left by an exception, which is the one to be told."""
        if self.tree is not None and not autograd_hooks.in_backward():
            with suppress(DureError):
                self.tree.forward_raised(self)

    def run(
        self,
        module: nn.Module,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a method of a module as its forward is run (Any: what it takes and gives)."""
        try:
            args, kwargs = self._before_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self.forward_raised()
            raise
        return self._after_forward(module, args, kwargs, output)

    def _before_backward(self, entry: nn.Module) -> None:
        assert self.tree is not None
        with self.step("FSDP::pre_backward"), self.tree.telling(self):
            self.tree.begin_backward(self, entry)

    def _gradient_accumulated(self, parameter: FSDPParameter) -> None:
        tree = self.tree or Tree(self)
        if self.in_backward and not tree.checks_gradients:
            return  # as for most gradients
        with tree.telling(self):
            tree.gradient_accumulated(self, parameter)

    def _after_backward(self) -> None:
        assert self.tree is not None
        if self.in_backward:
            with self.tree.telling(self):
                self.tree.reduce(self)

    def _before_state_dict(self, *_: Any) -> None:
        """Let the state dictionary have shards."""
        self.check_resident()
        self.reshard(keeps=self._is_read_later)

    def _before_loading(self, *_: Any) -> None:
        """Let values be written into shards."""
        self._before_state_dict()
        for group in self.groups:
            group.strategy.before_write()


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


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that was given to `fully_shard`."""
    return getattr(module, "_dure_fsdp", None)


def states_within(modules: Iterable[nn.Module]) -> list[FSDPState]:
    """Return the states of modules and of those within them, each once."""
    states = (state_of(inner) for module in modules for inner in module.modules())
    return [state for state in dict.fromkeys(states) if state is not None]


def states_in(model: nn.Module, op: str) -> list[FSDPState]:
    """Return the same of a model.

    Raises:
        ModuleError: Nothing of it is sharded.
    """
    states = states_within([model])
    if not states:
        raise ModuleError(
            "nothing of this module is sharded",
            op=op,
            seen=type(model).__name__,
            fix="Call fully_shard on it first.",
        )
    return states
