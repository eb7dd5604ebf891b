"""The hooks of a sharded module: which event calls which step of `Tree`.

    event                                    hook on                 then
    ---------------------------------------  ----------------------  ------------------------------
    forward begins                           the module              unshard
    forward ends                             the module              reshard, unless kept
    a gradient of its outputs arrives        output tensors          pre-backward: unshard
    forward is recomputed (a checkpoint)     the module              pre-backward: unshard
    a gradient of a parameter is computed    the unsharded           pre-backward, without unshard
                                             parameter
    gradients of all its inputs are computed input tensors           post-backward: reduce, reshard
    backward ends                            autograd                reduce what is left, reshard

Hooks on outputs and inputs only make unsharding and reducing early. *Whether* a module takes part
in a backward is known from the gradients of its parameters: a loss may be made from a tensor that a
module has kept, or that it returned in an object of any class. So a module that is in backward when
backward ends is reduced then, and no gradient is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from dure.comm.untraced import untraced
from dure.errors import DureError, ModuleError
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.state import FSDPState
from dure.parallel.fsdp.tree import Tree
from dure.training import autograd_hooks
from dure.training.pytrees import cast_floats, has_unknown_parts, tensors_of

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Hooks on the modules and parameters of one `fully_shard` call.

    Args:
        state: The state of the call. Its hooks are these.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state = state
        state.hooks = self
        for parameter in state.parameters:
            parameter.on_gradient = self._gradient_accumulated
        for module in state.modules:
            module._dure_fsdp = state  # pyright: ignore
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, with_kwargs=True)
            module.register_state_dict_pre_hook(self._pre_state_dict)
            module.register_load_state_dict_pre_hook(self._pre_load)

    def run(
        self,
        module: nn.Module,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a method of a module like its forward."""
        try:
            args, kwargs = self._pre_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self.forward_raised()
            raise
        return self._post_forward(module, args, kwargs, output)

    def forward_raised(self) -> None:
        """Clean up after a forward that raised; an error of the clean-up would hide its error."""
        tree = self._state.tree
        if tree is not None and not autograd_hooks.in_backward():
            with suppress(DureError):
                tree.forward_raised(self._state)

    # ---------------------------------------------------------------- forward

    @untraced
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard; cast inputs; watch for their gradients."""
        state = self._state
        tree = state.tree or Tree(state)
        if state.announce is not None and tree.entry is None and not autograd_hooks.in_backward():
            state.announce(module)
        with state.record("FSDP::pre_forward"), tree.explaining_errors(state):
            watches = True
            if autograd_hooks.in_backward():
                tree.pre_backward(state, module)
            else:
                begins = not state.running and (state.is_sharded or not state.to_run)
                if begins:
                    state.to_run.update(state.modules)
                    tree.pre_forward(state, module)
                state.running += 1
                # The backward of a list of modules ends with the module that was called first,
                # unless the program calls each of them by itself: then each is called first.
                watches = begins and (len(state.modules) == 1 or tree.entry is not module)
        dtype = state.policy.param_dtype
        if dtype is not None and state.policy.cast_forward_inputs:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        watches &= torch.is_grad_enabled()
        if watches and any(t.requires_grad for t in tensors_of((args, kwargs))):
            args, kwargs = autograd_hooks.on_inputs((args, kwargs), self._post_backward)
        return args, kwargs

    @untraced
    def _post_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Reshard; watch for gradients of the outputs."""
        state, tree = self._state, self._state.tree
        if state.policy.output_dtype is not None:
            output = cast_floats(output, state.policy.output_dtype)
        if autograd_hooks.in_backward():
            return output
        assert tree is not None
        with state.record("FSDP::post_forward"):
            state.to_run.discard(module)
            state.running = max(0, state.running - 1)
            if torch.is_grad_enabled():
                self._watch_outputs(output, (args, kwargs), tree.entry or module)
            if tree.entry is module and not state.running:
                state.to_run.clear()  # of a list of modules that the program calls by themselves
            if not (state.to_run or state.running):
                try:
                    state.reshard_after()
                    with tree.explaining_errors(state):
                        tree.post_forward(module)
                except ModuleError:
                    tree.reset()
                    raise
        return output

    def _watch_outputs(self, output: Any, inputs: Any, entry: nn.Module) -> None:
        """Watch for gradients of the outputs; note if one may arrive unseen."""
        state = self._state
        count = autograd_hooks.on_outputs(
            output, lambda _: self._pre_backward(entry), inputs=inputs
        )
        frees = any(group.strategy.frees for group in state.groups)
        if frees and (count == 0 or has_unknown_parts(output)) and self._may_have_graph(inputs):
            state.hides_backward = True

    def _may_have_graph(self, inputs: Any) -> bool:
        trained = any(p.is_trained for p in self._state.parameters)
        return trained or any(t.requires_grad for t in tensors_of(inputs))

    # ---------------------------------------------------------------- backward

    def _pre_backward(self, entry: nn.Module) -> None:
        state, tree = self._state, self._state.tree
        assert tree is not None
        with state.record("FSDP::pre_backward"), tree.explaining_errors(state):
            tree.pre_backward(state, entry)

    def _gradient_accumulated(self, parameter: FSDPParameter) -> None:
        state = self._state
        tree = state.tree or Tree(state)
        if state.in_backward and not tree.checks_gradients:
            return  # the usual case
        with tree.explaining_errors(state):
            tree.gradient_accumulated(state, parameter)

    def _post_backward(self) -> None:
        state, tree = self._state, self._state.tree
        assert tree is not None
        if state.in_backward:
            with tree.explaining_errors(state):
                tree.post_backward(state)

    # ---------------------------------------------------------------- state dictionaries

    def _pre_state_dict(self, *_: Any) -> None:
        """Put shards into the state dictionary."""
        state = self._state
        state.check_resident()
        state.reshard(keeps=state.is_read_later)

    def _pre_load(self, *_: Any) -> None:
        """Let values be written into shards."""
        self._pre_state_dict()
        for group in self._state.groups:
            group.strategy.before_write()
