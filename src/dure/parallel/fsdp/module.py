"""`FSDPModule`: the methods that a module has after `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dure.comm.untraced import untraced_here
from dure.errors import ModuleError, UsageError
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.reducing import CustomCollective
from dure.parallel.fsdp.state import FSDPState, state_of, states_within
from dure.parallel.fsdp.tree import Tree
from dure.training.grad_views import own_part
from dure.training.in_place import InPlace
from dure.training.module_times import StepTimes
from dure.training.uninitialized import marking

__all__ = ["FSDPModule", "UnshardHandle", "join_step", "share_comm_ctx"]


class UnshardHandle:
    """Of an `FSDPModule.unshard` that runs.

    Obtained from:
        `FSDPModule.unshard(async_op=True)`.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait until the module has its unsharded parameters."""
        if self._state is not None:
            _before_unshard(self._state)  # of shards that were loaded in the meantime
            self._state.wait_for_unshard()
            self._state = None


class FSDPModule(InPlace):
    """What a sharded module is besides its own class; see torch.distributed.fsdp.FSDPModule.

    Obtained from:
        `fully_shard`, which adds it to the classes of the module.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(4, 4))
        assert isinstance(model, fsdp.FSDPModule) and isinstance(model, torch.nn.Linear)
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)  # gradients are reduced once
            model(torch.ones(1, 4)).sum().backward()
        ```
    """

    prefix = "FSDP"
    made_by = "fully_shard"

    @untraced_here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Not a hook with ``always_call``: torch runs these after an `Exception`, and not after a
        KeyboardInterrupt, SystemExit or GeneratorExit.
        """
        try:
            return super().__call__(*args, **kwargs)  # pyright: ignore
        except BaseException:
            self._state().hooks.forward_raised()
            raise

    def _state(self) -> FSDPState:
        assert isinstance(self, nn.Module)
        state = state_of(self)
        assert state is not None
        return state

    def _states(self, recurse: bool = True) -> list[FSDPState]:
        """Return this module's state and, with `recurse`, those of modules within."""
        assert isinstance(self, nn.Module)
        return states_within([self]) if recurse else [self._state()]

    def _groups(self, recurse: bool = True) -> Iterator[ParameterGroup]:
        """Go through this module's groups and, with `recurse`, those of modules within."""
        return (group for state in self._states(recurse) for group in state.groups)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Change the shards, not unsharded parameters: `to`, `double`."""
        assert isinstance(self, nn.Module)
        for state in self._states():
            state.reshard()
            state.is_checked = False
        groups = self._state().groups
        on_meta = [g for g in groups if all(own_part(p.sharded).is_meta for p in g.parameters)]
        with marking(self):
            changed = super()._apply(*args, **kwargs)  # pyright: ignore
            for group in groups:  # at once, not all in memory of this rank first
                if group.parameters[0].files is not None:
                    group.adopt()
                    group.publish()
                elif group in on_meta:
                    group.adopt()
                    group.strategy.attach()
        return changed

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this module's parameters, not those of nested sharded modules.

        Between steps they have the values that all ranks have written before they called it.

        Args:
            async_op: Return a handle at once, whose `wait` is called before parameters are used.

        Collective:
            All ranks of the mesh.
        """
        state = self._state()
        _before_unshard(state)
        state.unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters, if it has any.

        A shard that was assigned in the meantime, as by ``load_state_dict(assign=True)``, stays.
        Any other parameter is dropped, as in torch: the shard takes its place.
        """
        state = self._state()
        state.reshard()
        if state.tree is not None:
            state.tree.after_reshard()

    @property
    def step_times(self) -> StepTimes:
        """Return what the last backward, and the forwards before it, waited for; by module."""
        tree = self._state().tree
        return StepTimes() if tree is None else tree.clock.last_times

    # ---------------------------------------------------------------- when gradients are reduced

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients from now on, or accumulate them unsharded, as `no_sync` of DDP.

        Args:
            requires_gradient_sync: True: reduce at each backward. False: keep this rank's unsharded
                gradients, to which later backwards add.
            recurse: Also for the sharded modules within this one.

        Cost:
            While False, the memory of all unsharded gradients on each rank.

        Example:
            ```python
            model = fsdp.fully_shard(torch.nn.Linear(8, 8))
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(torch.ones(2, 8)).sum().backward()
            assert model.weight.grad is not None  # the sum of both, averaged over the ranks
            ```
        """
        for group in self._groups(recurse):
            group.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce over the axis of replicas too, or add up this replica's parts first.

        Args:
            requires_all_reduce: False: reduce within the sharding axis only, and add to what
                earlier backwards left; a later backward with True reduces the sum over replicas.
            recurse: Also for the sharded modules within this one.
        """
        for group in self._groups(recurse):
            group.reduction.replicate = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, without effect: no state is kept between the backwards of one step.

        Args:
            is_last_backward: No effect.
        """

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by `factor` instead of the number of ranks.

        Args:
            factor: The divisor, for the parameters of this module alone.
        """
        for group in self._groups(recurse=False):
            group.reduction.divisor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have collectives sum, and divide afterwards.

        Args:
            enable: False: collectives average if their dtype allows it.
        """
        for group in self._groups():
            group.reduction.force_sum = enable

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: object = None
    ) -> None:
        """Have a function called with each group's reduced gradients.

        Args:
            hook: Gets this rank's parts, flat, and changes them in place: such as an all_reduce
                over ranks that the mesh has not. All ranks call it in one order. Parts that were
                reduced in float32 or bfloat16 are averages (the sum divided by
                `set_gradient_divide_factor`). With `set_force_sum_reduction_for_comms(True)` they
                are sums, which are divided after the hook. In any other dtype they are sums
                divided by a power of two near the root of the number of ranks (8 ranks: by 4), and
                divided by the rest after the hook. All of this is as in torch.
            stream: Nothing on CPU.
        """
        for group in self._groups(recurse=False):
            group.reduction.hook = hook

    # ---------------------------------------------------------------- a program's own collectives

    def set_custom_all_gather(self, comm: CustomCollective) -> None:
        """Have this module's parameters gathered by a program's own all_gather.

        Parameters that the ranks of a host share are gathered from then on, each rank into memory
        of its own.

        Args:
            comm: Has ``allocate(size, *, dtype, device)`` for input and output, and is called with
                ``(output, input, group, async_op)``; see `CustomCollective`.
        """
        for group in self._groups(recurse=False):
            group.all_gather = comm
            group.rebuild_strategy()

    def set_custom_reduce_scatter(self, comm: CustomCollective) -> None:
        """Have this module's gradients reduced by a program's own reduce_scatter.

        Args:
            comm: Has ``allocate`` as well, and is called with
                ``(output, input, group, op, async_op)``; see `CustomCollective`. The end of
                    each rank's part of the input is a count for each parameter: which ranks have a
                    gradient. A count that is not zero must not become zero.
        """
        for group in self._groups(recurse=False):
            group.reduction.reduce_scatter = comm

    def reduce_gradients(self) -> None:
        """Reduce what backwards without reduction have added up. For the root.

        A pipeline calls it after a step's last backward.

        Collective:
            All ranks of the mesh.
        """
        state = self._state()
        if state.tree is not None:
            state.tree.reduce_accumulated()

    # ---------------------------------------------------------------- resharding

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the unsharded parameters between forward and backward, or keep them.

        Args:
            reshard_after_forward: True frees them: less memory, one more gather per step.
            recurse: Also for the sharded modules within this one.

        Raises:
            UsageError: `reshard_after_forward` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "reshard_after_forward is a bool here", seen=f"{reshard_after_forward!r}"
            )
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free the unsharded parameters after backward, or keep them for the next microbatch.

        Args:
            reshard_after_backward: False keeps them, so that the next forward gathers nothing.
            recurse: Also for the sharded modules within this one.
        """
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Unshard in backward, or not, if backward does not read the parameters (embeddings).

        Args:
            unshard_in_backward: False: backward of this module finds its parameters sharded.
        """
        self._state().unshard_in_backward = unshard_in_backward

    # ---------------------------------------------------------------- what is gathered ahead

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set which modules are gathered when this one's forward begins.

        Args:
            modules: Sharded modules; empty: the one that came next in the first step.

        Raises:
            UsageError: One is not sharded.
        """
        self._state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set which modules are gathered when this one's backward begins.

        Args:
            modules: Sharded modules; empty: the one that came next in the first step.

        Raises:
            UsageError: One is not sharded.
        """
        self._state().backward_prefetch = _states_of(modules)

    # ---------------------------------------------------------------- what changes nothing here

    def set_post_optim_event(self, event: object) -> None:
        """Accepted, without effect: gathers of CPU parameters begin after the optimizer's step.

        Args:
            event: No effect.
        """

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted, without effect: gradients are always in memory that the ranks of a host share.

        Args:
            enable: No effect.
        """

    def set_symm_mem_for_comm(self, backend: str | None = None) -> None:
        """Accepted, without effect: gradients are always in the symmetric heap.

        Args:
            backend: No effect.
        """

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: a buffer is freed as soon as the ranks have read it.

        Args:
            max_input_buffers: At least 1.
            recurse: No effect.

        Raises:
            TypeError: `max_input_buffers` is not an int.
            UsageError: It is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise UsageError("at least one buffer is needed", seen=f"{max_input_buffers}")

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: a missing gradient counts as zeros if another rank has one.

        Args:
            reduce_scatter_unused_params: No effect.
            recurse: No effect.
        """

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted, without effect: reductions always have a channel of their own.

        Args:
            enable: No effect.
            recurse: No effect.
        """

    def reset_iter_state(self) -> None:
        """End a step that raised: drop what it has gathered and reduced. For the root."""
        state = self._state()
        if state.tree is not None:
            if state.tree.root is not state:
                raise ModuleError("reset_iter_state is for the root", op="reset_iter_state")
            state.tree.reset()


def _before_unshard(state: FSDPState) -> None:
    tree = state.tree or Tree(state)
    with tree.explaining_errors(state):
        tree.before_unshard(state)


def join_step(module: nn.Module) -> None:
    """Take part in a step of the others without a batch: gradients of this rank are zeros.

    It replaces one forward and one backward of the module; under `torch.no_grad()` one forward
    only. Then clip, step the optimizer and the scheduler as the others do::

        for batch in batches:  # as many on all ranks: None where a rank has no more
            if batch is None:
                join_step(model)
            else:
                loss_of(model, batch).backward()
            optimizer.step()

    Gradients are still divided by the number of all ranks.

    Args:
        module: The outermost sharded module, whose forward the others call.

    Raises:
        UsageError: It is not; or no step was made with a batch before, whose order of modules is
            followed.

    Collective:
        As a step.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(4, 1))
        model(torch.ones(1, 4)).sum().backward()  # a step with a batch on all ranks
        model.zero_grad()
        if dist.get_rank() == 0:
            model(torch.ones(1, 4)).sum().backward()
        else:
            fsdp.join_step(model)  # this rank has no more batches
        assert model.weight.grad.full_tensor().tolist() == [[0.5] * 4]  # half of rank 0's
        ```
    """
    state = state_of(module)
    if state is None or (state.tree is not None and state.tree.root is not state):
        raise UsageError(
            "join_step is for the outermost sharded module",
            op="join_step",
            seen=type(module).__name__,
        )
    (state.tree or Tree(state)).join_step()


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted: roots share what they communicate with, the channels of their group, anyway.

    Args:
        modules: Sharded modules.

    Raises:
        UsageError: One is not.

    Example:
        ```python
        first, second = (fsdp.fully_shard(torch.nn.Linear(4, 4)) for _ in range(2))
        fsdp.share_comm_ctx([first, second])
        assert second(first(torch.ones(1, 4))).shape == (1, 4)
        ```
    """
    _states_of(modules)


def _states_of(modules: Sequence[Any]) -> list[FSDPState]:
    states = [state_of(module) for module in modules]
    if None in states:
        raise UsageError("a module is not sharded", seen=f"{modules!r}"[:200])
    return [state for state in states if state is not None]
