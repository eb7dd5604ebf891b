"""What happens around a sharded module's forward and backward.

    forward  of the root: enter        module: unshard, compute, reshard        root: done
    backward                           module: unshard, compute, reduce, reshard
    end of backward: finish reductions, leave

Each `fully_shard` call has an `FSDPState`. States of modules within one another form a *tree*,
known from its first forward on, whose outermost module is the root. In forward a module's
parameters are gathered when it is called; in backward when the first gradient of its outputs
arrives; gradients are reduced when those of its inputs are there, or at the end.

All ranks must gather and reduce in one order. It is that of the first step (`Order`). A rank that
does not call a module, as its batch has nothing for it, takes part in the module's gathers and
reductions when it comes to the next one, and adds zeros.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from dure.comm.call import NOTHING, about, subject_of
from dure.comm.untraced import untraced
from dure.errors import Desync, ModuleError, PeerLost, UsageError
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.policies import MixedPrecisionPolicy
from dure.training import autograd_hooks
from dure.training.module_times import ModuleClock, now
from dure.training.pytrees import cast_floats, tensors_of
from dure.training.uninitialized import check_initialized

__all__ = ["FSDPState", "Order", "Tree", "state_of", "states_in", "states_within"]

_subject = cache(subject_of)
_MOST_REDUCTIONS = 2
"""Groups whose gradients are reduced at once."""


class Order:
    """In which order the first step gathered, or reduced; later steps keep to it.

    Attributes:
        is_known: A step was made.
        sequence: The order.
    """

    def __init__(self) -> None:
        self.sequence: list[FSDPState] = []
        self.is_known = False
        self._at = 0

    def begin(self) -> None:
        """Begin at the first."""
        self._at = 0

    def skipped(self, state: FSDPState) -> Sequence[FSDPState]:
        """Return those that come before `state`, and were not called; it is called next."""
        if not self.is_known:
            self.sequence.append(state)
            return ()
        if state not in self.sequence[self._at :]:
            return ()
        found = self.sequence.index(state, self._at)
        before = self.sequence[self._at : found]
        self._at = found + 1
        return before

    def coming(self) -> Sequence[FSDPState]:
        """Return the next one, or nothing where that is not known."""
        return self.sequence[self._at : self._at + 1] if self.is_known else ()

    def end(self) -> Sequence[FSDPState]:
        """Return those that were not called; from now on the order is known."""
        rest = self.sequence[self._at :] if self.is_known else ()
        self.is_known, self._at = True, len(self.sequence)
        return rest


class Tree:
    """The states of modules within one another, and where a step of them is."""

    def __init__(self, root: FSDPState) -> None:
        self.root, self.states = root, states_within(root.modules)
        for state in self.states:
            state.tree = self
        self._name_parameters(root)
        self.clock = ModuleClock()
        self.entry: FSDPState | None = None
        self._forwards: dict[FSDPState, Order] = {}
        self._backwards: dict[FSDPState, tuple[Order, Order]] = {}
        self._forward: Order | None = None
        self._backward: tuple[Order, Order] | None = None
        self._reducing: deque[tuple[str, ParameterGroup]] = deque()
        self._kept: set[FSDPState] = set()

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

    def begin_forward(self, state: FSDPState) -> None:
        """A module's forward begins; the outermost one's begins a step."""
        if self.entry is None:
            if self._backward is not None:  # which raised, so autograd has told of no end
                self.forget()
            if state.announce is not None:
                state.announce(state)
            self._forward = self._enter(self._forwards.setdefault(state, Order()))
            self.entry = state
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
            check_initialized(self.root.modules)
            for state in self.states:
                state.is_checked = True

    def _enter(self, order: Order) -> Order:
        """Begin a step: what was written before is seen by all."""
        self._leave(together=False)  # what an earlier forward reads is no longer awaited
        self._check_usable()
        for group in self.groups:
            group.adopt()
            group.strategy.publish()
        self.clock.begin_forward()
        self._take_turn()
        self._kept = set()
        order.begin()
        return order

    def _take_turn(self) -> None:
        """Wait until all ranks read what they share."""
        begin = now()
        for group in self.groups:
            group.strategy.enter()
        self.clock.turn(begin)

    def end_forward(self, state: FSDPState, raised: bool) -> None:
        """A module's forward has ended."""
        if raised:
            self.forget()
        if self.entry is not state:
            return
        assert self._forward is not None
        self.entry = None
        for each in self.states:
            if each.to_run:  # of a list of modules, forward has called some
                each.to_run.clear()
                each.reshard()
        self._join(self._forward.end())
        for group in self.groups:
            group.strategy.check_unwritten()
        if not torch.is_grad_enabled():
            self._leave(together=True)

    def _leave(self, together: bool) -> None:
        for group in self.groups:
            group.strategy.leave(together)

    # ---------------------------------------------------------------- backward

    def begin_backward(self, state: FSDPState, entry: FSDPState) -> None:
        """A module's backward begins, or its forward is run again in backward.

        Its orders are those of backwards of `entry`, whose forward the backward goes back through:
        on another rank, or in another step, it may begin at another module within.
        """
        if self._backward is None:
            self._enter_backward(self._backwards.setdefault(entry, (Order(), Order())))
            autograd_hooks.at_end(self._end_backward)
        assert self._backward is not None
        gathers, _ = self._backward
        if state.is_sharded and state.unshard_in_backward:
            self._join(gathers.skipped(state))
            self._gather(state, state.backward_prefetch or gathers.coming())
        state.in_backward = True

    def _enter_backward(self, orders: tuple[Order, Order]) -> None:
        self._backward = orders
        self._kept = {state for state in self.states if not state.is_sharded}
        for order in orders:
            order.begin()
        self.clock.begin_backward()
        self._take_turn()

    def join_step(self) -> None:
        """Take part in a forward of the root and, with gradients on, in its backward."""
        forward, backward = self._forwards.get(self.root), self._backwards.get(self.root)
        training = torch.is_grad_enabled()
        if forward is None or (training and backward is None):
            raise UsageError(
                "the first step needs a batch on every rank: others follow its order of modules",
                op="join_step",
                seen=f"no {'forward' if forward is None else 'backward'} of "
                f"{type(self.root.modules[0]).__name__} yet",
            )
        with self.telling():
            self._join(self._enter(forward).end())
            if training and backward is not None:
                with torch.no_grad():
                    self._enter_backward(backward)
                    self._finish(*backward)
            else:
                self._leave(together=True)

    def reduce_kept(self) -> None:
        """Reduce the gradients that backwards without `sync` have kept whole."""
        groups = [group for state in self.states for group in state.groups]
        syncs = [group.sync for group in groups]
        for group in groups:
            group.sync = True
        try:
            with self.telling(), torch.no_grad():
                orders = (Order(), Order())
                self._enter_backward(orders)
                for state in self.states:
                    state.in_backward = True
                self._finish(*orders)
        finally:
            for group, sync in zip(groups, syncs, strict=True):
                group.sync = sync

    def join_forward(self, entry: FSDPState) -> None:
        """Take part in a forward of other ranks, without gradients, which `entry` begins."""
        order = self._forwards.setdefault(entry, Order())
        with self.telling(entry), torch.no_grad():
            self._enter(order)
            self._join(order.end() if order.is_known else ())
            self._leave(together=True)

    def reduce(self, state: FSDPState) -> None:
        """A module's backward has ended."""
        assert self._backward is not None
        _, reductions = self._backward
        for each in (*reductions.skipped(state), state):
            self._begin_reduction(each)

    def _begin_reduction(self, state: FSDPState) -> None:
        """Begin to reduce a module's gradients; end what was begun long before it.

        So that flat copies of gradients do not pile up until backward ends.
        """
        begin = now()
        state.end_backward()
        reducing = [(state.name, g) for g in state.groups if g.reduction.is_begun]
        num_bytes = sum(g.trained_bytes for _, g in reducing)
        if num_bytes:
            group = reducing[0][1].reduction.group
            self.clock.reduction_started(state.name, begin, group, num_bytes)
        self._reducing += reducing
        while len(self._reducing) > _MOST_REDUCTIONS:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        name, group = self._reducing.popleft()
        begin = now()
        group.finish_reduction()
        self.clock.reduced(name, begin)

    def _end_backward(self) -> None:
        """Autograd has ended: reduce what is left, and wait for all."""
        if self._backward is not None:
            try:
                with self.telling():
                    self._finish(*self._backward)
            except ModuleError:
                self.forget()
                raise

    def _finish(self, gathers: Order, reductions: Order) -> None:
        for state in reversed(self.states):
            if state.in_backward:
                self.reduce(state)
        self._join(gathers.end())
        for state in reductions.end():
            self._begin_reduction(state)
        self.clock.last_wait()
        while self._reducing:
            self._finish_reduction()
        for state in self.states:
            for group in state.groups:
                if state.reshard_after_backward:
                    group.reshard()
                group.strategy.check_unwritten()
        self._backward = None
        begin = now()
        self._leave(together=True)
        self.clock.turn(begin)
        group = next(self.groups, None)
        if group is not None:
            self.clock.end_backward(group.reduction.axes.shard_group)

    def forget(self) -> None:
        """End a step that failed: reshard all, and drop its gradients."""
        self.entry, self._forward, self._backward = None, None, None
        self._reducing.clear()
        self.clock.forget()
        for state in self.states:
            state.in_backward = False
            state.running = 0
            state.to_run.clear()
        for group in self.groups:
            group.forget()
            group.reshard()
        self._leave(together=False)


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
        is_checked: Nothing is offloaded, nor made by `to_empty` and perhaps written by nobody.
        announce: Is called when a forward begins with this one; see `follow`.
        name: Path of its module in the root, for messages.
        is_offloaded: Shards have no values; see `offload`.
        to_run: Modules of the call that forward has not reached, where it has reached one.
        running: How many forwards of its modules run, within one another.
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
        self.in_backward = False
        self.is_checked = True
        self.is_offloaded = False
        self.announce: Callable[[FSDPState], None] | None = None
        self.name = "(root)"
        self.to_run: set[nn.Module] = set()
        self.running = 0
        self.tree: Tree | None = None
        self._raising: BaseException | None = None
        for module in self.modules:
            module._dure_fsdp = self  # pyright: ignore
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_loading)

    # ---------------------------------------------------------------- what groups do

    @property
    def is_sharded(self) -> bool:
        """Whether modules have shards."""
        return any(not group.unsharded for group in self.groups)

    def unshard(self) -> None:
        """Begin to make all parameters whole."""
        if self.is_sharded:
            begin = now()
            in_backward = self.tree is not None and self.tree.in_backward
            with self._comparing("gathered in backward" if in_backward else "gathered in forward"):
                begun = [group.unshard() for group in self.groups]
            if self.tree is not None:
                self.tree.clock.gather_started(self.name, begin, next(filter(None, begun), None))

    def show_wholes(self) -> None:
        """Let the modules have the wholes."""
        if self.is_sharded:
            begin = now()
            for group in self.groups:
                group.show_wholes()
            if self.tree is not None:
                self.tree.clock.gathered(self.name, begin)

    def reshard(self) -> None:
        """Let the modules have the shards."""
        for group in self.groups:
            group.reshard()

    def reshard_after(self) -> None:
        """Let the modules have the shards when a forward has ended, if they are to have them."""
        training, frees = torch.is_grad_enabled(), self.reshard_after_forward
        if frees is None:
            frees = self.tree is None or self.tree.root is not self
        if frees or not training:
            for group in self.groups:
                group.reshard(for_backward=training)

    def join_gather(self) -> None:
        """Take part in a gather whose result this rank does not need."""
        if self.is_sharded:
            self.unshard()
            self.show_wholes()
            self.reshard_after()

    def end_backward(self) -> None:
        """Reduce the gradients, and free the wholes."""
        with self._comparing("reduced"):
            for group in self.groups:
                group.end_backward()
        if self.reshard_after_backward:
            self.reshard()
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
        """Gather; cast inputs; ask to be told when their gradients are there (Any: any inputs)."""
        tree = self.tree or Tree(self)
        if autograd_hooks.in_backward():
            with tree.telling(self):
                tree.begin_backward(self, self)
        else:
            if not (self.to_run or self.running):
                self.to_run.update(self.modules)
                self._raising = sys.exc_info()[1]
                with tree.telling(self):
                    tree.begin_forward(self)
            self.running += 1
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of((args, kwargs))):
            args, kwargs = autograd_hooks.on_inputs((args, kwargs), self._after_backward)
        return args, kwargs

    @untraced
    def _after_forward(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """Free the wholes; ask to be told when a gradient of the outputs arrives."""
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        if autograd_hooks.in_backward():
            return output
        tree = self.tree
        assert tree is not None
        raised = sys.exc_info()[1] is not self._raising
        self.to_run.discard(module)
        self.running = max(0, self.running - 1)
        if torch.is_grad_enabled():
            entry = tree.entry or self
            autograd_hooks.on_outputs(output, lambda _: self._before_backward(entry))
        if raised or not (self.to_run or self.running):
            try:
                self.reshard_after()
                with tree.telling(self):
                    tree.end_forward(self, raised)
            except ModuleError:
                tree.forget()
                raise
        return output

    def run(
        self,
        module: nn.Module,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a method of a module as its forward is run (Any: what it takes and gives)."""
        args, kwargs = self._before_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after_forward(module, args, None)
            raise
        return self._after_forward(module, args, output)

    def _before_backward(self, entry: FSDPState) -> None:
        assert self.tree is not None
        with self.tree.telling(self):
            self.tree.begin_backward(self, entry)

    def _after_backward(self) -> None:
        assert self.tree is not None
        if self.in_backward:
            with self.tree.telling(self):
                self.tree.reduce(self)

    def _before_state_dict(self, *_: Any) -> None:
        """Let the state dictionary have shards."""
        self.check_resident()
        self.reshard()

    def _before_loading(self, *_: Any) -> None:
        """Let values be written into shards."""
        self._before_state_dict()
        for group in self.groups:
            group.strategy.before_write()


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
