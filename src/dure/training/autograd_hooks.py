"""When a backward begins, when each gradient is computed, when it has ended: hooks of autograd.

*Parameters* (`on_gradients`). Autograd reports each gradient that it has accumulated. These hooks
live as long as the parameters, and therefore hold their owner weakly: wrapping a module once more,
or throwing a wrapper away, leaves nothing of the old one behind.

Note "Hooks of the program". A hook that a program registers for a parameter's accumulated gradient
(`register_post_accumulate_grad_hook`) is to see the reduced gradient, once, and not this rank's
own. So of a parameter's hooks autograd sees those of this module alone; the program's are kept
apart (`_Hooks`), whether they came before or after, and the owner runs them when the gradient has
been reduced (`hooks_of_program`).

*Outputs* (`on_outputs`). A gradient that arrives at an output of a module says that a backward
through it is running, also one that reaches no parameter on this rank (all its inputs were masked
out) while the other ranks wait for it. These hooks live as long as the graph, and hold what they
call, so that the backward is seen even if the program has dropped the module. They do not
hold the output's own node, so that the graph is free to go.

*Inputs* (`on_inputs`). When gradients of all inputs of a module are computed, its backward is over.

*The end* (`at_end`, `at_end_or_failure`, `at_end_else`). Autograd calls back when the running
backward has ended; where it raises, it drops the callback.

Note "Is it a backward?". A gradient arrives at an output in `torch.autograd.grad` as well, which
hands gradients out and accumulates none (a gradient penalty calls it, between forward and
backward). Only autograd knows which it is, and it answers one question: will this node of the graph
be executed? For a parameter's accumulating node

* *yes* means that this is a backward that fills ``.grad``;
* an exception means `autograd.grad` with respect to this parameter;
* *no* means either that the call does not fill ``.grad`` or that it does not reach this parameter.

To distinguish the last two, the graph is followed from an output to any leaf, which is asked.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from dure import torch_private
from dure.training.pytrees import mapped, tensors_of

__all__ = [
    "at_end",
    "at_end_else",
    "at_end_or_failure",
    "fills_gradients",
    "hooks_of_program",
    "in_backward",
    "is_shared",
    "keeps_graph",
    "on_gradients",
    "on_inputs",
    "on_outputs",
    "restore",
    "task_id",
    "will_reach",
]

T = TypeVar("T")
Hook = Callable[[torch.Tensor], None]

# Looked up once: finding it takes longer than calling it.
at_end: Callable[[Callable[[], None]], None]
at_end = torch_private.execution_engine.queue_callback
"""Have autograd call a function at the end of the backward that is running."""
_will_execute = torch_private.will_engine_execute_node
keeps_graph: Callable[[], bool]
keeps_graph = torch_private.keeps_graph
"""Return whether the running backward keeps its graph for another one (``retain_graph``)."""


def on_gradients(
    owner: T, call: Callable[[T, int], None], parameters: Iterable[torch.Tensor]
) -> weakref.finalize[..., T]:
    """Have `call(owner, number)` called whenever a gradient of a parameter has been accumulated.

    Args:
        owner: Held weakly; the hooks go with it.
        call: Gets the parameter's number in `parameters`.
        parameters: Leaves that need a gradient.

    Returns:
        What takes the hooks away when it is called.
    """
    me = weakref.ref(owner)
    ends = [_on_gradient(me, call, number, p) for number, p in enumerate(parameters)]
    end = weakref.finalize(owner, _call_all, ends)
    end.atexit = False
    return end


def _on_gradient(
    owner: weakref.ref[T], call: Callable[[T, int], None], number: int, parameter: torch.Tensor
) -> Callable[[], None]:
    def gradient_accumulated(_: torch.Tensor) -> None:
        me = owner()
        if me is not None:
            call(me, number)

    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore
    if not isinstance(hooks, _Hooks):
        hooks = _Hooks(OrderedDict[int, Hook]() if hooks is None else hooks)
    key = hooks.add_own(gradient_accumulated)
    _set_hooks(parameter, hooks)

    def remove() -> None:
        hooks.remove_own(key)
        if not hooks.has_own:
            _set_hooks(parameter, hooks.of_program)

    return remove


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _set_hooks(parameter: torch.Tensor, hooks: dict[int, Hook]) -> None:
    parameter._post_accumulate_grad_hooks = hooks  # pyright: ignore


def hooks_of_program(parameter: torch.Tensor) -> OrderedDict[int, Hook]:
    """Return the hooks that a program has for a parameter's accumulated gradient, now and later.

    Of a parameter that was given to `on_gradients`.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore
    return hooks.of_program


def is_shared(parameter: torch.Tensor) -> bool:
    """Return whether `on_gradients` has two owners for a parameter."""
    return len(parameter._post_accumulate_grad_hooks) > 1  # pyright: ignore


class _Hooks(OrderedDict[int, Hook]):
    """The hooks of a parameter; see the note "Hooks of the program".

    As a dictionary in C, which autograd reads, it has this module's hooks. In Python, where torch's
    `RemovableHandle` adds and removes hooks, it is the program's.

    Attributes:
        of_program: The program's hooks: the dictionary that the parameter had before.
    """

    def __init__(self, of_program: OrderedDict[int, Hook]) -> None:
        super().__init__()
        self.of_program = of_program
        # Handles refer to dictionaries weakly, and are to work when `of_program` is back in place.
        of_program.kept_apart = self  # pyright: ignore[reportAttributeAccessIssue]

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.of_program[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.of_program[key]

    def __contains__(self, key: object) -> bool:
        return key in self.of_program

    @property
    def has_own(self) -> bool:
        """Whether this module has hooks."""
        return len(self) > 0

    def add_own(self, hook: Hook) -> int:
        """Add a hook of this module's; return its key."""
        key = id(hook)
        super().__setitem__(key, hook)
        return key

    def remove_own(self, key: int) -> None:
        """Remove it."""
        super().__delitem__(key)


def restore(parameter: torch.Tensor) -> None:
    """Let autograd call the hooks that a parameter has for its accumulated gradients.

    `torch.utils.swap_tensors` leaves them with the Python object, and autograd without them; hooks
    that are registered afterwards are not called either.
    """
    hooks = parameter._post_accumulate_grad_hooks  # pyright: ignore
    if hooks:
        parameter._post_accumulate_grad_hooks = hooks  # pyright: ignore


def on_outputs(
    outputs: object, call: Callable[[Sequence[Any]], None], inputs: object = None
) -> int:
    """Have `call(nodes)` called when a gradient arrives at a tensor of `outputs`, any pytree.

    `nodes` are those of the graph under that tensor.

    Args:
        outputs: Of the module.
        call: May be called more than once in a backward.
        inputs: Of the module. If given, the hooks survive a caller that writes into an output that
            is a view (``y = block(x); y += 1``): such a write replaces the view's node, so the
            tensor that it is a view of gets a hook as well, unless that is one of the inputs.

    Returns:
        The number of output tensors that a gradient can arrive at.
    """
    given: set[int] | None = None
    count = 0
    for tensor in tensors_of(outputs):
        if tensor.grad_fn is None:
            continue
        count += 1
        tensor.register_hook(_output_hook(call, _below(tensor.grad_fn)))
        base = tensor._base  # pyright: ignore[reportPrivateUsage]
        if base is None or base.grad_fn is None or inputs is None:
            continue
        if given is None:
            given = {id(t if t._base is None else t._base) for t in tensors_of(inputs)}  # pyright: ignore[reportPrivateUsage]
        if id(base) not in given:
            base.register_hook(_output_hook(call, _below(base.grad_fn)))
    return count


def _output_hook(
    call: Callable[[Sequence[Any]], None], below: Sequence[Any]
) -> Callable[[torch.Tensor], None]:
    def gradient_arrived(_: torch.Tensor) -> None:
        call(below)

    return gradient_arrived


def on_inputs(inputs: Any, call: Callable[[], None]) -> Any:
    """Have `call()` called when gradients of all tensors of `inputs` have arrived.

    Returns:
        The pytree, in which tensors that need gradients are others, to be used instead.
    """
    found = [t for t in tensors_of(inputs) if t.requires_grad]
    through: Any = _AfterBackward.apply(call, *found)
    passed = dict(zip(map(id, found), through, strict=True))
    return mapped(inputs, lambda t: passed.get(id(t), t))


class _AfterBackward(torch.autograd.Function):
    """Calls a function when gradients of all the tensors that it passes on have arrived."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return None, *gradients


def at_end_or_failure(call: Callable[[], None]) -> None:
    """Have `call` called when the running backward ends; it may be twice, or when it has raised."""
    at_end(_AtEnd(call))


class _AtEnd:
    """Calls `end` when autograd does, or when autograd drops it because the backward raised."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()


def at_end_else(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Have `ended` called when the running backward ends, or `failed` when it has raised.

    `failed` is called by a destructor: it must not raise or wait, nor communicate.
    """
    at_end(_AtEndElse(ended, failed))


class _AtEndElse:
    """Calls `ended` when autograd does, or `failed` when autograd drops it without a call."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed = ended, failed
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._ended()

    def __del__(self) -> None:
        if not self._was_called:
            self._failed()


def task_id() -> int:
    """Return the number of the backward that runs on this thread; -1 outside of any."""
    return torch_private.current_graph_task_id()


def in_backward() -> bool:
    """Tell whether the calling thread is inside a backward (checkpoints run forward there)."""
    return task_id() >= 0


def will_reach(accumulator: Any) -> bool:
    """Tell whether the running backward adds to the gradient that `accumulator` fills.

    Any: autograd's nodes have no public type. To be called during a backward.
    """
    try:
        return _will_execute(accumulator)
    except RuntimeError:  # autograd.grad with respect to this very leaf
        return False


def fills_gradients(accumulator: Any, nodes: Sequence[Any]) -> bool:
    """Tell whether the running backward fills gradients of leaves.

    Args:
        accumulator: Of a parameter that is likely to be reached.
        nodes: Those below an output of the module, whose gradient has arrived.

    Cost:
        One question; where that does not decide, as many steps as the graph is deep.
    """
    try:
        if _will_execute(accumulator):
            return True
        leaf = _any_leaf(nodes)
        return leaf is not None and _will_execute(leaf)
    except RuntimeError:
        return False


def _below(node: Any) -> list[Any]:
    """Return the nodes that `node` hands gradients to."""
    return [n for n, _ in node.next_functions if n is not None]


def _any_leaf(nodes: Sequence[Any]) -> Any:
    """Follow the graph from `nodes` down to the first leaf that is found, depth first."""
    seen: set[Any] = set()
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            return node
        for child in reversed(_below(node)):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return None
