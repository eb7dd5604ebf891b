"""`DistributedDataParallel`: the module that users wrap theirs in.

It owns the parts and decides when they act: reducer.py for gradients, buffers.py for buffers, and
before the first step it makes the ranks' modules equal. Arguments and attributes have the names of
torch's class.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.profiling import profiler, step
from dure.comm.untraced import untraced, untraced_here
from dure.comm.world import resolve
from dure.errors import CommError, HookError
from dure.parallel.ddp.buckets import ReducerOptions
from dure.parallel.ddp.buffers import BufferSync
from dure.parallel.ddp.comm_hooks import CommHook, HookRunner, check_hook, name_of
from dure.parallel.ddp.join import JoinableReplica
from dure.parallel.ddp.reducer import Reducer
from dure.parallel.ddp.step_times import BucketClock
from dure.parallel.ddp.torch_names import Report, TorchNames
from dure.parallel.ddp.validation import (
    BucketCaps,
    WrappedParameters,
    buffer_owners,
    buffer_rules,
    checked_device_ids,
    chosen_group,
    refuse_delayed,
    refuse_divided,
    refuse_foreign_batch_norm,
    refuse_wrapped,
    trained_parameters,
)
from dure.training.agreement import broadcast_tensors, describe_tensor, verify_equal
from dure.training.autograd_hooks import on_outputs
from dure.training.compiling import Cutting, cut_graphs
from dure.training.grad_views import GradView, NamedParameter, own_part
from dure.training.module_times import StepTimes
from dure.training.precision import ComputeCopies, MixedPrecision
from dure.training.pytrees import moved

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchNames, JoinableReplica, torch.nn.Module):
    """Data parallelism: every rank has the complete module and its own part of each batch.

    During `backward` gradients are averaged over the ranks of the group, bucket by bucket, while
    the remaining ones are computed. If the loss is a mean over equal parts of a batch, the result
    is the gradient of the full batch.

    Gradients live in the buckets: on the ``shm`` backend in memory that the ranks share, so that
    they are reduced in place. `p.grad` behaves like a separate tensor, except for
    one thing: views that a program takes of it see the next step's values.

    Collective:
        Construction, each synchronised forward of a module with buffers, and each synchronised
        backward; all ranks of the group, in the same order.

    Cost:
        A step sends as much as an all_reduce of all gradients, in one all_reduce for each bucket.

    Numerics:
        The average is taken in the order of ranks, and bitwise equal on all of them.

    Threads:
        One thread a rank runs forward and backward.

    Args:
        module: The module; its parameters and buffers must be the same in kind on all ranks, and
            take rank 0's values. Parameters may be frozen afterwards, on all ranks; unfrozen
            ones are refused, and those added afterwards are not averaged.
        device_ids: None, or the one device that the module is on; inputs are then moved to it.
        output_device: Accepted for compatibility; it can only be the module's device.
        dim: Accepted for compatibility; batches are not split here.
        broadcast_buffers: Deprecated; what `forward_sync_buffers` is, but False also leaves the
            buffers of each rank as they are now.
        init_sync: Verify the modules and broadcast rank 0's values now.
        process_group: The ranks that take part; all by default.
        bucket_cap_mb: Size of a bucket in MiB, 25 by default.
        find_unused_parameters: Allow that a rank's loss does not depend on all parameters. A
            parameter that no rank used keeps its gradient as it was.
        check_reduction: Accepted for compatibility.
        gradient_as_bucket_view: Accepted for compatibility; gradients always live in the buckets.
        static_graph: Every backward is like the first: the same parameters are used, equally
            often. Unused ones are allowed, and left out; reentrant checkpoints may share layers.
        delay_all_reduce_named_params: Refused; see docs/ddp.md.
        param_to_hook_all_reduce: Refused; see docs/ddp.md.
        mixed_precision: Compute and reduce in fewer bits than the parameters are kept in.
        device_mesh: A mesh of one axis whose group takes part, instead of `process_group`.
        mesh: The same, under Dure's name.
        skip_all_reduce_unused_params: With `find_unused_parameters`: those that no rank used in the
            first step are never used, and not reduced.
        bucket_cap_mb_list: Sizes of the first, the second, ... bucket; the last one holds for all
            further ones.
        batched_grad_copy: Accepted for compatibility; gradients are not copied.
        forward_sync_buffers: Send rank 0's buffers to all before a forward that follows a
            synchronised one; True by default.

    Raises:
        ModuleError: No parameter needs a gradient, the module is wrapped already, or the ranks'
            modules differ (with the first difference); from forward: parameters were replaced or
            unfrozen; from `backward`, on every rank: parameters without a gradient, by name.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp(torch.full((2, 4), float(dist.get_rank()))).mean().backward()
        assert ddp.module.weight.grad.unique().item() == 0.5  # the mean of ranks 0 and 1
        optimizer.step()
        ```
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        mesh: Any = None,
    ) -> None:
        super().__init__()
        refuse_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        buffers = buffer_rules(broadcast_buffers, forward_sync_buffers)
        ignored: object = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore: set[str] = set(ignored)  # pyright: ignore
        refuse_wrapped(module, self.parameters_to_ignore)
        refuse_foreign_batch_norm(module)
        trained = trained_parameters(module, self.parameters_to_ignore)
        self.module = module
        self.process_group = chosen_group(process_group, device_mesh if mesh is None else mesh)
        refuse_divided(trained, self.process_group)
        self.device_ids = checked_device_ids(device_ids, trained)
        self.output_device, self.dim = output_device, dim
        self.forward_sync_buffers = buffers.in_forward
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self._precision = MixedPrecision.of(mixed_precision)
        self._copies: ComputeCopies | None = self._make_copies()
        self.require_backward_grad_sync = True
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self._caps = BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._caps.usual
        self.bucket_bytes_cap_list = list(self._caps.listed)
        self._report = Report(self._settings())
        self.require_forward_param_sync = True
        self._reducer: Reducer | None = None
        self._wrapped: WrappedParameters | None = None
        self._buffer_sync: BufferSync | None = None
        if init_sync:
            self._replicate(buffers.at_first)
        self._connect(trained)

    def _connect(self, trained: Sequence[NamedParameter]) -> Reducer:
        """Make the parts that communicate. Collective, where buckets are shared memory."""
        group = self.process_group
        self._wrapped = WrappedParameters(self.module, trained, self.parameters_to_ignore)
        owners = buffer_owners(self.module, self.parameters_to_ignore)
        self._buffer_sync = BufferSync(group, owners) if owners else None
        options = ReducerOptions(
            caps=self._caps.all,
            allow_unused=self.find_unused_parameters or self.static_graph,
            static_graph=self.static_graph,
            leave_out_unused=self.skip_all_reduce_unused_params,
            reduce_dtype=self._precision.gradients,
        )
        # A weak reference: a cycle would keep shared memory until the garbage collector comes.
        self._reducer = Reducer(group, trained, options, weakref.ref(self))
        self._reducer.report(type(self.module).__name__)
        return self._reducer

    def replaced(self, views: Sequence[GradView]) -> Sequence[GradView]:
        """Return those of `views` whose parameters were replaced; called by the reducer."""
        wrapped = self._wrapped
        return () if wrapped is None else [v for v in views if wrapped.is_replaced(v)]

    def step_ended(self, number: int, clock: BucketClock, error: Exception | None) -> None:
        """Take note of a synchronised step; called by the reducer."""
        self._report.sample(number, clock)
        if error is not None:
            self._report.keep(error)

    @property
    def reducer(self) -> Reducer:
        """The part that averages gradients; a copy of a module makes its own on first use."""
        if self._reducer is not None:
            return self._reducer
        return self._connect(trained_parameters(self.module, self.parameters_to_ignore))

    def __getstate__(self) -> dict[str, object]:
        """Return what `pickle`, `torch.save` and `copy.deepcopy` keep: all but the connections."""
        if self.process_group is not resolve(None, "DistributedDataParallel"):
            raise self._report.failed(
                "only a module on the default process group can be copied or pickled",
                seen=f"this one is on the group {self.process_group.group_name!r}",
                fix="Save ddp.module.state_dict(), or copy ddp.module and wrap the copy.",
            )
        gone = {"process_group", "_reducer", "_buffer_sync", "_copies", "join_slot", "_wrapped"}
        return {k: v for k, v in self.__dict__.items() if k not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back on the default group of the rank that loads."""
        super().__setstate__(state)
        self.process_group = resolve(
            None, "loading a pickled DistributedDataParallel (save ddp.module.state_dict() instead)"
        )
        self._wrapped = None
        self._copies = self._make_copies()
        self._reducer, self._buffer_sync, self.require_forward_param_sync = None, None, False

    def _settings(self) -> dict[str, object]:
        """Describe how the module was wrapped, in torch's terms."""
        return {
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
        }

    def _replicate(self, buffers: bool) -> None:
        """Verify that all ranks have the same module, and give it rank 0's values."""
        kept = self._replicated()
        verify_equal(self.process_group, [describe_tensor(k, t) for k, t in kept.items()])
        own = set() if buffers else set(self.module.buffers())
        broadcast_tensors(self.process_group, [own_part(t) for t in kept.values() if t not in own])

    def _replicated(self) -> dict[str, torch.Tensor]:
        """Return what is the same on all ranks: parameters and buffers that are not ignored."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {k: t for k, t in named.items() if k not in self.parameters_to_ignore}

    # ---------------------------------------------------------------- running

    @untraced_here
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        if profiler._is_profiler_enabled:
            with step("DistributedDataParallel.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    @untraced_here
    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._is_replaced():
            return self._watch_replaced(self._compute(inputs, kwargs))
        self._before_forward(sync)
        if self.device_ids:
            device = torch.device(self.device_ids[0])
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        outer = cut_graphs(Cutting(self.bucket_bytes_cap))
        try:
            outputs = self._compute(inputs, kwargs)
        finally:
            cut_graphs(outer)
        self._after_forward(sync, outputs)
        return outputs

    def _compute(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the wrapped module itself; changes of how it computes act here alone."""
        if self._copies is None:
            return self.module(*inputs, **kwargs)
        return self._copies.run(self.module, inputs, kwargs)

    @untraced
    def _is_replaced(self) -> bool:
        return self._wrapped is not None and self._wrapped.all_replaced()

    @untraced
    def _watch_replaced(self, outputs: Any) -> Any:
        assert self._wrapped is not None
        self._wrapped.refuse_for_good(outputs)
        return outputs

    @untraced
    def _before_forward(self, sync: bool) -> None:
        """Do what comes before the module's own forward; collective where buffers are due."""
        if sync or self._reducer is not None:
            self.reducer.prepare(sync)
        if sync and self._wrapped is not None:
            self._wrapped.refuse_unfrozen()
        self._share_buffers(sync)

    @untraced
    def _after_forward(self, sync: bool, outputs: object) -> None:
        """Do what comes after it: a buffer hook, and getting ready for backward."""
        self._late_buffers(sync)
        if sync:
            on_outputs(outputs, self.reducer.on_output)

    def _make_copies(self) -> ComputeCopies | None:
        """Make what lets the module compute in low precision, if it shall."""
        if not self._precision.computes:
            return None
        return ComputeCopies(self.module, self._precision, self.parameters_to_ignore)

    def _share_buffers(self, sync: bool) -> None:
        """Broadcast the buffers before a forward, if the last one was synchronised."""
        buffers = self.will_sync_module_buffers()
        self.announce_forward(sync or buffers)
        if buffers and self._buffer_sync is not None and not self._buffer_sync.acts_after_forward:
            root = self.announce_buffers()
            try:
                self._buffer_sync.before_forward(root)
            except CommError as error:
                self.explain(error)
                raise

    def _late_buffers(self, sync: bool) -> None:
        """Run a buffer hook that is due, and note whether the next forward shares buffers."""
        due = self._buffer_sync is not None and self._buffer_sync.acts_after_forward
        if due and self.will_sync_module_buffers():
            self.announce_late_buffers()
            self.shadow_late_buffers()
        self.require_forward_param_sync = sync

    def shadow_buffers(self, root: int) -> None:
        """Take part in what the others do with their buffers before a forward."""
        if self._buffer_sync is not None:
            self._buffer_sync.before_forward(root)

    def shadow_late_buffers(self) -> None:
        """Take part in what the others do with their buffers after a forward."""
        if self._buffer_sync is not None:
            self.reducer.reductions.awaited_too += self._buffer_sync.after_forward()

    def broadcast_module_from(self, root: int) -> None:
        """Overwrite parameters and buffers with those of the group rank `root`. Collective."""
        broadcast_tensors(self.process_group, [*map(own_part, self._replicated().values())], root)

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward broadcasts buffers."""
        return bool(
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self._buffer_sync is not None
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add up gradients on this rank alone, for forwards inside the context.

        The first backward of a forward outside it averages the sums. It is the forward that
        counts: put it inside the context together with its backward.

        Returns:
            A context.

        Example:
            ```python
            with ddp.no_sync():
                ddp(torch.ones(2, 4)).mean().backward()  # adds up on this rank
            ddp(torch.ones(2, 4)).mean().backward()  # averages both
            ```
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def reduce_gradients(self) -> None:
        """Average what backwards inside `no_sync` have added up, without another backward.

        A pipeline calls it after a step's last backward.

        Collective:
            All ranks of the group.
        """
        self.reducer.reduce_kept()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Have `hook(state, bucket)` reduce the buckets instead of an averaging all_reduce.

        Args:
            state: Handed to the hook as it is, e.g. a process group.
            hook: Gets a `GradBucket` and returns a future of the reduced flat tensor (or of a list
                with it). It may start collectives, and chains to their futures with `then` the work
                that follows them. `dure.parallel.ddp.hooks` has some.

        Raises:
            HookError: The hook's signature is wrong, or there is a hook already; from `backward`,
                on every rank: the hook failed, or its result does not fit the bucket.

        Cost:
            One more collective of a few bytes per step, which reports unused parameters and hooks
            that failed. Callbacks run at the end of backward.
        """
        self._take_hook(state, hook, name_of(hook))

    def _take_hook(self, state: object, hook: CommHook, name: str) -> None:
        """Register a hook that is known as `name`."""
        try:
            check_hook(hook)
            registered = self.reducer.reductions.hook
            if registered is not None:
                raise HookError(
                    "register_comm_hook can be called once only",
                    seen=f"{registered.name} is registered",
                    fix="Combine what both hooks do in one function.",
                )
        except HookError as error:
            self._report.keep(error)
            raise
        self.reducer.reductions.hook = HookRunner(self.process_group, state, hook, name)

    @property
    def step_times(self) -> StepTimes:
        """What the last synchronised forward and backward took, and how much was communication."""
        return self.reducer.times
