"""What DTensors do in a block of code: operators, their placements, what was communicated and why.

`explain` prints it as a table; `CommDebugMode` (debug.py) counts it, by module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dure import trace
from dure.comm.queries import get_rank
from dure.comm.untraced import untraced_below
from dure.tensor.dispatch import dispatch, has_own_way
from dure.tensor.dtensor import DTensor
from dure.tensor.redistribute import Step, running
from dure.tensor.registry import rule_of
from dure.tensor.spec import DTensorSpec

__all__ = ["Explanation", "Operation", "Watch", "explain", "in_columns"]


@dataclass(slots=True)
class Operation:
    """An operator on DTensors, or what was communicated outside of one.

    Attributes:
        name: The operator, such as "aten.mm.default"; "" for what belongs to none: a
            `redistribute` of the program, a gradient that is read.
        inputs, outputs: Specs, or plain tensors as text.
        steps: What redistributions communicated.
        plain: Collectives besides, by their names in Dure.
        functional: Whether `plain` is a functional collective that the program called.
        module: Name of the module whose forward it belongs to; "" outside of modules.
        backward: Whether autograd ran it.
    """

    name: str
    inputs: list[DTensorSpec | str] = field(default_factory=list)
    outputs: list[DTensorSpec | str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    module: str = ""
    backward: bool = False
    unruled: bool = False
    functional: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that this rank receives in redistributions."""
        return sum(step.nbytes for step in self.steps)

    def why(self) -> str:
        """Say what the communication was for."""
        if not (self.steps or self.plain):
            return ""
        if not self.name:
            return "asked for"
        if self.unruled:
            return "no rule for it: decomposed or replicated"
        said: list[str] = []
        for step in self.steps:
            numbers = [n for n, s in enumerate(self.inputs) if s is step.before]
            who = f"operand {numbers[0]}" if numbers else "an operand"
            said.append(f"{who} as {step.after.placements[step.axis]} along {step.axis_name}")
        if self.plain:
            said.append("ranks combine what each found")
        return "; ".join(dict.fromkeys(said))


class Watch(TorchDispatchMode):
    """Collects operations of this rank on the thread that enters, and collectives of all threads.

    Args:
        where: Returns the name of the module that runs.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._where = where
        self._open: Operation | None = None
        self._functional = False
        self._rank = -1
        self._hook: trace.Hook | None = None

    def __enter__(self) -> Watch:
        self._rank = get_rank()
        self._hook = trace.add_hook(before=self._collective)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._hook is not None:
            trace.remove_hook(self._hook)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the next method, for which it would load its compiler."""
        return False

    @untraced_below
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note an operator, and run it as it would be run without being watched."""
        kwargs = kwargs or {}
        inputs = _seen((args, kwargs))
        if not any(isinstance(one, DTensorSpec) for one in inputs):
            if getattr(func, "namespace", "") != "dure":
                return func(*args, **kwargs)
            self._functional = True
            try:
                return func(*args, **kwargs)
            finally:
                self._functional = False
        one = self._new(str(func))
        one.inputs, one.unruled = inputs, rule_of(func) is None and not has_own_way(func)
        self._open = one
        try:
            result = dispatch(func, args, kwargs)
        finally:
            self._open = None
        one.outputs = _seen(result)
        return result

    def _new(self, name: str) -> Operation:
        backward = torch._C._current_graph_task_id() != -1  # pyright: ignore
        one = Operation(name, module=self._where(), backward=backward)
        self.operations.append(one)
        return one

    def _collective(self, event: trace.Event) -> None:
        if event.global_rank != self._rank:
            return
        one, step = self._open or self._new(""), running.get()
        one.functional = self._functional
        if step is None:
            one.plain.append(event.op)
            return
        one.steps.append(step)
        if not one.name:
            one.inputs, one.outputs = [step.before], [step.after]


def _seen(values: Any) -> list[DTensorSpec | str]:
    """Return the spec of each DTensor in nested values, and plain tensors as text."""
    found: list[DTensorSpec | str] = []
    for one in pytree.tree_leaves(values):
        if type(one) is DTensor:
            found.append(one.spec)
        elif isinstance(one, torch.Tensor):
            found.append(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}")
    return found


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a function did with DTensors; its text is a table.

    Attributes:
        result: What the function returned.
        operations: In their order.
    """

    result: Any
    operations: list[Operation]

    def __str__(self) -> str:
        head = ("operator", "in", "out", "communication", "bytes", "why")
        return in_columns([head, *map(_row, self.operations)], ruled=True)


def in_columns(rows: Sequence[Sequence[str]], ruled: bool = False) -> str:
    """Return rows as lines of text, their columns below each other; a rule below the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if ruled:
        rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _row(one: Operation) -> tuple[str, ...]:
    told = [f"{s.move.value}[{s.axis_name}]" for s in one.steps] + one.plain
    name = (one.name or "(redistribute)") + (" (backward)" if one.backward else "")
    places = (", ".join(map(str, specs)) for specs in (one.inputs, one.outputs))
    return (name, *places, ", ".join(told), str(one.nbytes or ""), one.why())


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run a function and print what it did with DTensors: operators, communication, and why.

    Args:
        fn: Any function, such as a model or a whole training step.
        args, kwargs: Its arguments.

    Returns:
        What was done, with the function's result; global rank 0 prints it.

    Collective:
        Whatever the function calls.

    Cost:
        Some microseconds an operator.
    """
    with Watch() as watch:
        result = fn(*args, **kwargs)
    told = Explanation(result, watch.operations)
    if get_rank() == 0:
        print(told)
    return told
