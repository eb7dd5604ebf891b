"""The state of one `fully_shard` call: its modules, and its groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from dure.comm import profiling
from dure.comm.call import NOTHING, about, subject_of
from dure.comm.profiling import UNRECORDED, profiler
from dure.errors import ModuleError
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.policies import MixedPrecisionPolicy
from dure.training.module_times import now

if TYPE_CHECKING:
    from dure.parallel.fsdp.hooks import ModuleHooks
    from dure.parallel.fsdp.tree import Tree

__all__ = ["FSDPState", "state_of", "states_in", "states_within"]

_subject = cache(subject_of)


class FSDPState:
    """The state of one `fully_shard` call.

    Args:
        modules: The modules that were given to the call.
        groups: Their parameters.
        policy: Dtypes.
        reshard_after_forward: None: yes, except for the root.

    Attributes:
        reshard_after_backward: Free the unsharded parameters when backward has ended.
        unshard_in_backward: Unshard in backward; off if backward does not read the parameters.
        forward_prefetch, backward_prefetch: States to unshard ahead, as set by the program.
        in_backward: Its backward has begun, and its gradients are not reduced yet.
        is_checked: No parameter is offloaded, on the meta device, or made by `to_empty` and never
            written.
        announce: Called when a forward begins with one of these modules; see `follow`.
        name: Path of its module in the root, for messages.
        is_offloaded: Shards have no values; see `offload`.
        to_run: Modules of the call that a forward, which has run another one, has yet to run.
        running: How many forwards of its modules run, nested.
        hides_backward: Some outputs did not allow to see their backward begin.
        waits_for_backward: Unsharded parameters are kept from a forward to its backward.
        tree: The tree that it belongs to, from the first forward on.
        hooks: Its hooks on the modules.
    """

    hooks: ModuleHooks

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

    @property
    def parameters(self) -> Iterator[FSDPParameter]:
        """The parameters of all groups."""
        return (parameter for group in self.groups for parameter in group.parameters)

    @property
    def is_sharded(self) -> bool:
        """Whether modules have shards."""
        return any(not group.is_unsharded for group in self.groups)

    def record(self, name: str, happens: bool = True) -> AbstractContextManager[object]:
        """Return a profiler record for a step of these modules, if one of torch's profilers runs.

        It records nothing if the step does not happen, or if the modules have no parameters that
        this call manages; as in torch.
        """
        if profiler._is_profiler_enabled and happens and self.groups:
            return profiling.step(name, self.name)
        return UNRECORDED

    def unshard(self) -> None:
        """Start to unshard all parameters."""
        if not self.is_sharded:
            return
        begin = now()
        in_backward = self.tree is not None and self.tree.in_backward
        what = "gathered in backward" if in_backward else "gathered in forward"
        profiled = profiler._is_profiler_enabled
        begins = profiled and any(group.begins_gather for group in self.groups)
        with self.record("FSDP::all_gather", begins):
            self.begin_comparing(what)
            try:
                begun = [group.unshard() for group in self.groups]
            finally:
                about(NOTHING)
        if self.tree is not None:
            self.tree.clock.gather_started(self.name, begin, next(filter(None, begun), None))

    def wait_for_unshard(self) -> None:
        """Wait until parameters are unsharded, and let the modules have them."""
        if not self.is_sharded:
            return
        begin = now()
        with self.record("FSDP::all_gather_copy_out"):
            for group in self.groups:
                group.wait_for_unshard()
        if self.tree is not None:
            self.tree.clock.gathered(self.name, begin)

    def reshard(self, keeps: bool = False) -> None:
        """Let the modules have the shards; free the unsharded parameters, unless `keeps`."""
        for group in self.groups:
            group.reshard(keeps=keeps)

    def reshard_after(self) -> None:
        """Reshard when a forward has ended, as `reshard_after_forward` says."""
        training, frees = torch.is_grad_enabled(), self.reshard_after_forward
        if frees is None:
            frees = self.tree is None or self.tree.root is not self
        if training and (self.hides_backward or not frees):
            self.waits_for_backward = True
        if frees or not training:
            for group in self.groups:
                group.reshard(for_backward=training, keeps=self.is_read_later)

    @property
    def is_read_later(self) -> bool:
        """Whether a backward that may not be seen to begin will read the unsharded parameters."""
        return self.waits_for_backward or (self.tree is not None and self.tree.keeps_unsharded)

    def join_unshard(self) -> None:
        """Take part in an unshard of other ranks, whose result this rank does not need."""
        if self.is_sharded:
            self.unshard()
            self.wait_for_unshard()
            self.reshard_after()

    def begin_reduce(self) -> None:
        """Start to reduce the gradients."""
        with self.record("FSDP::post_backward_reduce"):
            self.begin_comparing("reduced")
            try:
                for group in self.groups:
                    group.begin_reduce()
            finally:
                about(NOTHING)
        self.in_backward = False

    def begin_comparing(self, what: str) -> None:
        """Have ranks compare which module they communicate for, until ``about(NOTHING)``.

        Modules may have the same number of bytes, so sizes alone do not show a mismatch.
        """
        about(_subject(f"{self.name}, {what}"))

    def check_resident(self) -> None:
        """Raise a ModuleError if the model is offloaded."""
        if self.is_offloaded:
            raise ModuleError(
                "the model is offloaded",
                seen=type(self.modules[0]).__name__,
                fix="Call fsdp.onload(model) first.",
            )


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that was given to `fully_shard`."""
    return getattr(module, "_dure_fsdp", None)


def states_within(modules: Iterable[nn.Module]) -> list[FSDPState]:
    """Return the states of modules and of their submodules, each once."""
    states = (state_of(inner) for module in modules for inner in module.modules())
    return [state for state in dict.fromkeys(states) if state is not None]


def states_in(model: nn.Module, op: str) -> list[FSDPState]:
    """Return the states of a model and of its submodules.

    Raises:
        ModuleError: No part of the model is sharded.
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
