"""`ZeroRedundancyOptimizer`: every rank updates its own part of the parameters (ZeRO, stage 1).

An optimizer on n replicas does the same work n times and keeps the same state n times. Here each
rank has an ordinary torch optimizer for its *shard* of the parameters (partition.py), which is all
the state it keeps; after the update all ranks gather the new values (parameter_all_gather.py).

    gradients (the same on all ranks)
       |                                  rank 0          rank 1          rank 2
       '-- step: local optimizer on     shard 0         shard 1         shard 2
                 new values of        all shards      all shards      all shards

Two sets of parameter groups are kept equal: `param_groups`, which users and schedulers of learning
rates see, has all parameters; the local optimizer's have this rank's. Before each update options go
from the first to the second, after it back.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.functional import HasGroup, group_of
from dure.errors import CommError, NotInGroupError, OptimizerError
from dure.parallel.optim.parameter_all_gather import ParameterAllGather, explain
from dure.parallel.optim.partition import ParameterPartition
from dure.parallel.optim.states import State, by_number, gather_state, merged, own_part
from dure.training.agreement import describe_tensor, verify_equal
from dure.training.join import Join, Joinable, JoinHook
from dure.training.shared_parameters import SharedParameters, clusters_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["ZeroRedundancyOptimizer"]

_OF_THE_GROUP_ALONE = frozenset({"params", "param_names"})


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Any torch optimizer, with its work and its state divided over the ranks.

    Gradients must be the same on all ranks, as DDP leaves them. Works for optimizers that update
    each parameter by itself, which is nearly all of them (not LBFGS).

    Args:
        params: Tensors, (name, tensor) pairs, or dictionaries with options, as for any optimizer;
            the same on all ranks.
        optimizer_class: Updates a shard, such as `torch.optim.AdamW`.
        process_group: The ranks; all by default.
        mesh: A mesh of one axis whose group takes part, instead of `process_group`.
        parameters_as_bucket_view: Keep the parameters side by side in flat tensors, of which
            `p.data` are views: fewer collectives.
        overlap_with_ddp: The update happens inside DDP's backward, by a communication hook from
            `hook_with_zero_step` or `hook_with_zero_step_interleaved`; `step` then does nothing.
        host_shared_parameters: Keep one copy of the parameters a host, in memory that its ranks
            share; each updates its shard in place, and nothing is exchanged. Shards are those of
            a host's ranks. Takes rank 0's values. Between steps parameters are read, and not
            written by each rank for itself: ``p.mul_(2)`` on every rank multiplies n times.
        **defaults: Options of `optimizer_class`, such as ``lr=1e-3``.

    Attributes:
        optim: The local optimizer, on this rank's shard.
        state: The local optimizer's state: that of this rank's parameters.

    Collective:
        Construction, `step`, `add_param_group` and `consolidate_state_dict`, on all ranks of the
        group in the same order.

    Cost:
        A step's work and the state's memory are 1/n of the unsharded optimizer's; S/n bytes of S
        are sent, in an all_gather of the updated parameters. With `host_shared_parameters`: two
        barriers, nothing sent.

    Numerics:
        Bitwise those of the unsharded optimizer.

    Threads:
        One thread a rank.

    Raises:
        OptimizerError: Parameters that cannot be optimized, or cannot be shared.
        ModuleError: The ranks' parameters differ; the first difference is named.
        UsageError: `host_shared_parameters` on a backend without shared memory.
        PeerLost: From `step`, a rank died. Parameters may be half updated then, on any rank:
            continue from a checkpoint.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = dist.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        ddp(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        assert len(optimizer.state) == 1  # this rank's half of the two parameters
        ```
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        host_shared_parameters: bool = False,
        mesh: HasGroup | None = None,
        **defaults: Any,
    ) -> None:
        self._ready = False
        chosen = process_group if mesh is None else mesh
        self.process_group = group_of(chosen, "ZeroRedundancyOptimizer")
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self._check_kinds(host_shared_parameters)
        if not callable(optimizer_class):
            raise OptimizerError(
                "ZeroRedundancyOptimizer takes the class of an optimizer, and makes it itself",
                seen=f"a {type(optimizer_class).__name__}",
                fix="Write ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01).",
            )
        try:
            torch.optim.Optimizer.__init__(self, _as_list(params), dict(defaults))
        except (TypeError, ValueError) as error:
            raise _from_torch(error) from error
        Joinable.__init__(self)
        hosts = self.process_group.hosts if host_shared_parameters else [range(self.world_size)]
        among = next(ranks for ranks in hosts if self.rank in ranks)
        self._partition = ParameterPartition(among, self.rank)
        self._consolidated: list[State] | None = None
        self._check_agreement(self.param_groups)
        for group in self.param_groups:
            self._partition.assign(group["params"])
        self._shared: SharedParameters | None = None
        if host_shared_parameters:
            _refuse_other_devices(self._partition.parameters)
            self._shared = SharedParameters(self.process_group, self._partition.parameters)
        self.optim = optimizer_class(list(map(self._local_group, self.param_groups)), **defaults)
        self.defaults = {**self.optim.defaults, **defaults}
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)
        self._all_gather = ParameterAllGather(
            self.process_group, self._partition, host_shared_parameters, parameters_as_bucket_view
        )
        self._ready = True

    def _check_kinds(self, host_shared: bool) -> None:
        if host_shared and self.parameters_as_bucket_view:
            raise OptimizerError(
                "parameters cannot be in shared memory and in buckets of each rank's own",
                seen="host_shared_parameters=True and parameters_as_bucket_view=True",
                fix="Leave out parameters_as_bucket_view: in shared memory nothing is exchanged.",
            )

    # ---------------------------------------------------------------- parameters and groups

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Make the local optimizer's part of a group."""
        mine = [p for p in group["params"] if p in self._partition.mine]
        return {**_options_of(group), "params": mine}

    def _check_agreement(self, groups: Sequence[dict[str, Any]], first_group: int = 0) -> None:
        """Raise unless all ranks have the same parameters in `groups`. Collective."""
        lines = _described(groups, first_group)
        verify_equal(self.process_group, lines, "parameters to optimize")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, e.g. those of layers that are unfrozen.

        Parameters that were added before keep their owners.

        Args:
            param_group: ``{"params": [...]}``, with options in place of the optimizer's defaults.

        Collective:
            All ranks of the group, with the same parameters.
        """
        if not self._ready:  # torch's constructor
            _check_layouts(param_group)
            super().add_param_group(param_group)
            return
        try:
            _check_layouts(param_group)
            super().add_param_group(param_group)
        except (TypeError, ValueError) as error:
            raise _from_torch(error) from error
        group = self.param_groups[-1]
        _copy_options(self.param_groups[:-1], self.optim.param_groups)
        self._check_agreement([group], len(self.param_groups) - 1)
        self._partition.assign(group["params"])
        if self._shared is not None:
            _refuse_other_devices(group["params"])
            self._shared.add(group["params"])
        self.optim.add_param_group(self._local_group(group))
        _copy_options(self.optim.param_groups, self.param_groups)
        self._all_gather.plan()

    # ---------------------------------------------------------------- stepping

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Update this rank's parameters, and have all ranks' new values.

        Args:
            closure: Computes the loss and the gradients, for optimizers that want it.
            **kwargs: Handed to the local optimizer's `step`.

        Returns:
            What the local optimizer's `step` returns: the closure's result, if there is one.

        Collective:
            All ranks of the group. With ``overlap_with_ddp=True`` it does nothing.
        """
        if self.overlap_with_ddp:
            return None
        Join.notify_join_context(self)
        try:
            loss = self._step_local(closure, kwargs)
            self.gather()
        except CommError as error:
            explain(error)
            raise
        return loss

    def _step_local(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Update this rank's parameters."""
        if closure is None:
            self._wait_for_readers()
            return self.update(**kwargs)
        calls: list[Any] = []

        def evaluate() -> Any:
            if calls and self._shared is not None:
                raise OptimizerError(
                    "this optimizer evaluates the model between updates, which other ranks change",
                    seen=f"{type(self.optim).__name__} called its closure more than once in a step",
                    fix="Use it without host_shared_parameters.",
                )
            calls.append(closure())
            self._wait_for_readers()
            return calls[-1]

        return self.update(closure=evaluate, **kwargs)

    def _wait_for_readers(self) -> None:
        """In shared memory: wait until no rank computes with the parameters any more."""
        if self._shared is not None and self._shared.barrier():
            self._check_agreement(self.param_groups)
            self._shared.rebind()

    def update(self, only: Sequence[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the local optimizer, with the options that users have set."""
        _copy_options(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if only is None else self._update_only(only)
        _copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _update_only(self, only: Sequence[torch.Tensor]) -> Any:
        """Run the local optimizer on some of its parameters.

        Torch's optimizers keep their state by parameter, so one that sees a part of its groups
        does what it does for these parameters when it sees all.
        """
        chosen = set(only)
        everything = [group["params"] for group in self.optim.param_groups]
        try:
            for group in self.optim.param_groups:
                group["params"] = [p for p in group["params"] if p in chosen]
            return self.optim.step()
        finally:
            for group, params in zip(self.optim.param_groups, everything, strict=True):
                group["params"] = params

    def gather(self) -> None:
        """Let all ranks have the new values. Collective: all ranks of the group."""
        self._all_gather.run()

    # ---------------------------------------------------------------- stepping inside backward

    def update_overlapped(self, parameters: Sequence[torch.Tensor]) -> None:
        """Update those of `parameters` that are this rank's, and start to send them.

        Collective:
            All ranks of the group, with the same parameters.
        """
        mine = [p for p in parameters if p in self._partition.mine]
        if mine:
            self.update(mine)
        self._all_gather.start(parameters)

    def finish_overlapped(self, updated: set[torch.Tensor]) -> None:
        """Wait until all ranks have all new values; `updated` are the parameters of all buckets.

        Collective:
            All ranks of the group.
        """
        self._all_gather.wait()
        if self._shared is not None and self._shared.barrier():
            raise OptimizerError(
                "a parameter is not in shared memory any more, on this rank or another",
                fix="Change dtypes before the optimizer is made, or do not overlap.",
            )
        self._all_gather.tell_autograd(updated)
        everything = enumerate(self._partition.parameters)
        left = [i for i, p in everything if p.requires_grad and p not in updated]
        if left:
            raise OptimizerError(
                "parameters of the optimizer are in none of DDP's buckets, and so never updated",
                seen=f"{len(left)} of them, the first one is number {left[0]}",
                fix="Give the optimizer the parameters of the module that DDP wraps.",
            )

    # ---------------------------------------------------------------- state

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`: the same, with the state of its shard only.

        For checkpoints to which every rank writes its own part. The parts of all ranks put together
        are what `load_state_dict` wants.
        """
        return super().state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the full state to rank `to`, so that it can call `state_dict`.

        Args:
            to: Rank of the group.

        Collective:
            All ranks of the group. See `states.gather_state` for the cost.
        """
        if to not in range(self.world_size):
            raise NotInGroupError(
                f"to={to!r} is not a rank of the group",
                group=self.process_group.group_name,
                seen=f"its ranks are 0 to {self.world_size - 1}",
            )
        _copy_options(self.param_groups, self.optim.param_groups)
        target_host = next(host for host in self.process_group.hosts if to in host)
        sends = self._shared is None or self.rank in target_host
        mine = by_number(self._state_dict_without_hooks()) if sends else {}
        self._consolidated = gather_state(self.process_group, mine, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, in the form of the unsharded optimizer's.

        It is as old as the last `consolidate_state_dict`. Entries of an optimizer under keys that
        are no parameters are this rank's.

        Hooks of state dictionaries get the full state.

        Raises:
            OptimizerError: The state has not been brought to this rank.
        """
        if self._consolidated is None:
            if self.world_size == 1:
                return self.local_state_dict()
            raise OptimizerError(
                "this rank has only its own part of the optimizer's state",
                rank=self.rank,
                world_size=self.world_size,
                fix=f"Call consolidate_state_dict(to={self.rank}) on all ranks first, or "
                "state_dict() only on the rank that it was brought to.",
            )
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = merged(self._state_dict_without_hooks(), self._consolidated)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def _state_dict_without_hooks(self) -> dict[str, Any]:
        """Return this rank's part of the state, as it is."""
        with _without(self._optimizer_state_dict_pre_hooks, self._optimizer_state_dict_post_hooks):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a full state: of any world size, or of no sharding at all.

        Args:
            state_dict: What `state_dict` returned on some rank. The tensors of
                this rank's part become the optimizer's own, as with torch's optimizers.

        Raises:
            OptimizerError: Its groups are not this optimizer's.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        try:
            with _without(self._optimizer_load_state_dict_pre_hooks):
                super().load_state_dict(own_part(state_dict, self._partition.keeps))
        except ValueError as error:
            raise _from_torch(error) from error
        self.optim.__setstate__({"state": self.state, "param_groups": self.optim.param_groups})
        self.state = self.optim.state
        _copy_options(self.param_groups, self.optim.param_groups)
        self._consolidated = None

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied: connections cannot be."""
        raise OptimizerError(
            "a sharded optimizer cannot be copied or pickled",
            fix="Save state_dict(), after consolidate_state_dict() on all ranks.",
        )

    # ---------------------------------------------------------------- joining

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what steps along on a rank that has run out of inputs."""
        del kwargs
        return _StepAlong(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._partition.parameters[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that step together."""
        return self.process_group


class _StepAlong(JoinHook):
    """Updates this rank's shard although it has run out of inputs: no other rank would."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Make the step that others announced."""
        self._optimizer.step()


@contextmanager
def _without(*all_hooks: dict[int, Any]) -> Iterator[None]:
    """Empty dictionaries of hooks for a while; their handles keep working."""
    kept = [dict(hooks) for hooks in all_hooks]
    for hooks in all_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(all_hooks, kept, strict=True):
            hooks.update(before)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what of a group is not its parameters."""
    return {k: v for k, v in group.items() if k not in _OF_THE_GROUP_ALONE}


def _described(groups: Sequence[dict[str, Any]], first_group: int = 0) -> list[str]:
    """Describe each parameter in `groups`, as ranks compare it; the first is `first_group`."""
    lines: list[str] = []
    for g, group in enumerate(groups, first_group):
        names = group.get("param_names") or [
            f"param_groups[{g}].params[{i}]" for i in range(len(group["params"]))
        ]
        ties = {i: c[0] for c in clusters_of(group["params"]) for i in c if i != c[0]}
        for i, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            tie = f" (in the memory of {names[ties[i]]})" if i in ties else ""
            lines.append(describe_tensor(name, parameter) + tie)
    return lines


def _as_list(params: Iterable[Any]) -> Any:
    """Return `params` as torch's constructor takes them, a single tensor as it is."""
    return params if isinstance(params, torch.Tensor) else list(params)


def _check_layouts(param_group: dict[str, Any]) -> None:
    """Raise for parameters that cannot be exchanged."""
    params = param_group["params"]
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    param_group["params"] = tensors
    sparse = [
        i
        for i, p in enumerate(p[1] if isinstance(p, tuple) else p for p in tensors)
        if isinstance(p, torch.Tensor) and p.layout is not torch.strided
    ]
    if sparse:
        raise OptimizerError(
            "a sharded optimizer is for dense parameters (gradients may be sparse)",
            seen=f"parameter {sparse[0]} of the group is not dense",
        )


def _refuse_other_devices(parameters: Sequence[torch.Tensor]) -> None:
    """Raise for parameters that ranks cannot share."""
    elsewhere = {str(p.device) for p in parameters if p.device.type != "cpu"}
    if elsewhere:
        raise OptimizerError(
            "host_shared_parameters=True is for parameters on the CPU",
            seen=f"parameters are on {', '.join(sorted(elsewhere))}",
            fix="Leave it out; the optimizer's state is sharded all the same.",
        )


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy what is not a parameter from some groups to their counterparts."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(_options_of(theirs))


def _from_torch(error: Exception) -> Exception:
    """Make what torch says of parameters an error of ours."""
    return error if isinstance(error, OptimizerError) else OptimizerError(str(error))
