"""Records of the operators on DTensors in a block of code: placements, communication and reasons.

`explain` prints them as a table; `CommDebugMode` (debug.py) counts collectives by module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dure import trace
from dure.comm.queries import get_rank
from dure.comm.untraced import untraced_below
from dure.tensor.dispatch import dispatch, is_special
from dure.tensor.dtensor import DTensor
from dure.tensor.redistribute import RedistributionStep, running
from dure.tensor.registry import rule_of
from dure.tensor.spec import DTensorSpec
from dure.torch_private import TorchDispatchMode, current_graph_task_id, pytree

__all__ = ["Explanation", "Operation", "OperationRecorder", "explain", "in_columns"]


@dataclass(slots=True)
class Operation:
    """An operator on DTensors, or communication outside of one.

    Attributes:
        name: The operator, such as "aten.mm.default"; "" for a `redistribute` of the program, a
            gradient that is read, and other communication outside of operators.
        inputs, outputs: Specs of DTensors; plain tensors as text.
        steps: The redistributions that communicated.
        plain: Names of other collectives.
        module: Name of the module whose forward it belongs to; "" outside of modules.
        backward: Whether autograd ran it.
        unruled: Whether the operator has no sharding rule.
        functional: Whether `plain` is a functional collective that the program called.

    Obtained from:
        `Explanation.operations`.
    """

    name: str
    inputs: list[DTensorSpec | str] = field(default_factory=list)
    outputs: list[DTensorSpec | str] = field(default_factory=list)
    steps: list[RedistributionStep] = field(default_factory=list)
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
        """Return the reason of the communication; "" if there was none."""
        if not (self.steps or self.plain):
            return ""
        if not self.name:
            return "requested by the program"
        if self.unruled:
            return "no sharding rule: decomposed, or computed on full tensors"
        reasons: list[str] = []
        for step in self.steps:
            numbers = [n for n, s in enumerate(self.inputs) if s is step.before]
            operand = f"operand {numbers[0]}" if numbers else "an operand"
            placement = step.after.placements[step.axis]
            reasons.append(f"{operand} must be {placement} along {step.axis_name}")
        if self.plain:
            reasons.append("combines the ranks' results")
        return "; ".join(dict.fromkeys(reasons))


class OperationRecorder(TorchDispatchMode):
    """Records this rank's operators on the thread that enters, and collectives on all threads.

    Args:
        module_name: Returns the name of the module that runs.
    """

    def __init__(self, module_name: Callable[[], str] = str) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._module_name = module_name
        self._open: Operation | None = None
        self._functional = False
        self._rank = -1
        self._hook: trace.Hook | None = None

    def __enter__(self) -> OperationRecorder:
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
        """Keep torch from wrapping `__torch_dispatch__`, for which it would load its compiler."""
        return False

    @untraced_below
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operator, and run it as without the recorder."""
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
        one.inputs, one.unruled = inputs, rule_of(func) is None and not is_special(func)
        self._open = one
        try:
            result = dispatch(func, args, kwargs)
        finally:
            self._open = None
        one.outputs = _seen(result)
        return result

    def _new(self, name: str) -> Operation:
        backward = current_graph_task_id() != -1
        one = Operation(name, module=self._module_name(), backward=backward)
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
    """The operators on DTensors and the communication of a function; `str` returns a table.

    Attributes:
        result: The function's result.
        operations: The operations, in the order of the calls.

    Obtained from:
        `explain`.
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
    communication = [f"{s.move.value}[{s.axis_name}]" for s in one.steps] + one.plain
    name = (one.name or "(redistribute)") + (" (backward)" if one.backward else "")
    specs = (", ".join(map(str, group)) for group in (one.inputs, one.outputs))
    return (name, *specs, ", ".join(communication), str(one.nbytes or ""), one.why())


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run a function and print its operators on DTensors, their communication, and the reasons.

    Args:
        fn: Any function, such as a model or a training step.
        args, kwargs: Its arguments.

    Returns:
        The operations and the function's result. Global rank 0 also prints them, as a table.

    Collective:
        The collectives of the function.

    Cost:
        Some microseconds per operator.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, explain, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        found = explain(lambda: x.sum().full_tensor())
        assert found.result.item() == 8.0
        assert [operation.name for operation in found.operations] == ["aten.sum.default", ""]
        ```
    """
    with OperationRecorder() as recorder:
        result = fn(*args, **kwargs)
    explanation = Explanation(result, recorder.operations)
    if get_rank() == 0:
        print(explanation)
    return explanation
