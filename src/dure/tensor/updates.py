"""Optimizers of `torch.optim` over DTensors: a step updates the parts, not operator by operator.

An optimizer that computes element by element collects parameters, gradients and state in lists (its
method `_init_group`) and passes them to one function, such as `torch.optim.adam.adam`, which
updates them in the requested form: a loop, lists (`foreach`) or one kernel (`fused`). A hook that
torch calls before every step gives each optimizer that holds DTensors an `_init_group` that puts
the parts into these lists. Only that optimizer object changes: nothing in `torch.optim` is
replaced, and optimizers without DTensors of Dure, or of classes that are not torch's own, run as
they are.

Parts are used if all tensors of a parameter have its placements; a gradient with other placements
is redistributed first. In all other cases the lists stay as they are, and the step runs operator by
operator (rules/foreach.py): Partial parameters, updates that autograd records, and a learning rate
that is a DTensor. A fused kernel gets copies of parts whose strides differ from the parameter's.

After its update SGD with momentum stores the buffers under the parameters in these lists, which are
now parts. A second hook moves them to the DTensors, before all other hooks after the step. A step
that runs without its hooks (``step.__wrapped__``) gets the DTensors, and runs operator by operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dure.comm.untraced import untraced_below
from dure.tensor.autograd import to_target
from dure.tensor.dtensor import DTensor
from dure.tensor.rules.foreach import Specs, are_parts, parts_like
from dure.tensor.spec import DTensorSpec
from dure.tensor.strides import stored_like, with_equal_strides, write_back
from dure.tensor.wrapping import wrap

__all__ = ["ELEMENTWISE"]

ELEMENTWISE = frozenset({
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
})  # fmt: skip
"""Classes whose update of an element depends on no other element; subclasses may differ."""


class _Collector:
    """The `_init_group` of an optimizer that holds DTensors: it collects their parts.

    Attributes:
        announced: The groups that the running step has not collected yet, if the hook before it was
            called, so that the hook after it can be expected, too. After a step that raised in a
            group, later groups are left, and the next step does not begin with one of them.
        momenta: The DTensors of the running step of SGD with momentum, and their parts.
        copies: Parts that a fused kernel needs in another order, and the copies that it gets.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # the optimizer holds this object
        self.announced: Iterator[dict[str, Any]] = iter(())
        self.momenta: list[tuple[DTensor, torch.Tensor]] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @untraced_below
    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Fill an optimizer's lists as its class does, then replace the DTensors in them by parts.

        Args:
            group: A group of parameters.
            lists: Parameters, gradients, and the tensors of each kind of state. The update writes
                all but the gradients.
        """
        self._store()  # of the previous group: the update of this one may raise
        optimizer: Any = self._optimizer()
        result = type(optimizer)._init_group(optimizer, group, *lists)
        needs_dtensors = next(self.announced, None) is not group or torch.is_grad_enabled()
        parts = None if needs_dtensors else _parts_of(group, lists)
        if parts is None:
            return result
        if group.get("fused"):
            parts, self.copies = with_equal_strides(parts)
        has_scale = getattr(optimizer, "grad_scale", None) is not None
        written = [t for n, tensors in enumerate(lists) if n != 1 or has_scale for t in tensors]
        torch.autograd.graph.increment_version([t for t in written if type(t) is DTensor])
        if type(optimizer) is torch.optim.SGD and group["momentum"]:
            pairs = zip(lists[0], parts[0], strict=True)
            self.momenta += [(p, part) for p, part in pairs if type(p) is DTensor]
        for tensors, own in zip(lists, parts, strict=True):
            tensors[:] = own
        return result

    def end_step(self, *_: object) -> None:
        """Store the results of the last group; the hook after a step."""
        self._store()

    def _store(self) -> None:
        """Write copies back; move the buffers that SGD has stored under parts to the parameters."""
        optimizer: Any = self._optimizer()
        write_back(self.copies)
        self.copies = []
        for parameter, part in self.momenta:
            made = optimizer.state.pop(part, {}).get("momentum_buffer")
            state = optimizer.state[parameter]
            if made is not None and state.get("momentum_buffer") is None:  # of the first step
                spec = parameter.spec.compact().with_dtype(made.dtype)
                state["momentum_buffer"] = wrap(stored_like(made, part), spec)
        self.momenta.clear()


_collectors: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Collector]
_collectors = weakref.WeakKeyDictionary()
"""The collector of each optimizer; `_init_group` may be wrapped again (mapped_files.py)."""


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make an optimizer of DTensors collect parts, from its first step on."""
    if type(optimizer) not in ELEMENTWISE:
        return
    collector = _collectors.get(optimizer)
    if collector is None:
        if not any(type(p) is DTensor for group in optimizer.param_groups for p in group["params"]):
            return
        collector = _collectors[optimizer] = _Collector(optimizer)
        optimizer._init_group = collector  # pyright: ignore
        handle = optimizer.register_step_post_hook(collector.end_step)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # pyright: ignore
    collector.copies = []  # those of a step that raised must not be written
    collector.announced = iter(optimizer.param_groups)


def _parts_of(group: dict[str, Any], lists: Iterable[list[Any]]) -> list[list[Any]] | None:
    """Return lists with parts in the place of DTensors; None if the update needs DTensors."""
    parameters, gradients, *state = lists
    specs: Specs = [t.spec if type(t) is DTensor else None for t in parameters]
    if not are_parts(specs) or any(type(option) is DTensor for option in group.values()):
        return None
    found = [parts_like(parameters, specs), parts_like(gradients, specs)]
    if found[1] is None:
        found[1] = parts_like([*map(_placed_as, gradients, specs)], specs)
    found += [parts_like(tensors, specs) for tensors in state]
    parts = [own for own in found if own is not None]
    return parts if len(parts) == len(found) else None


def _placed_as(gradient: Any, spec: DTensorSpec | None) -> Any:
    """Return a gradient with the placements of its parameter, if both are on one mesh."""
    if type(gradient) is not DTensor or spec is None or gradient.device_mesh != spec.mesh:
        return gradient
    return to_target(gradient, gradient.spec.with_placements(spec.placements))


register_optimizer_step_pre_hook(_before_step)
