"""What programs use of torch's DDP although its name begins with an underscore.

Libraries on top of torch (trainers, recommenders, profilers) call these methods, and a program that
is moved over with its import changed shall find them. Each is a line or two over the parts that do
work; docs/ddp.md lists the names of torch that have no meaning here, with the reason.

*Logging data* (``ddp._get_ddp_logging_data()``) say how the module was wrapped, how its gradients
were bucketed, and, for sampled steps, when each phase began and ended in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from dure import env
from dure.errors import ModuleError
from dure.parallel.ddp.buffers import BufferHook, BufferHookLocation
from dure.parallel.ddp.hooks.default_hooks import allreduce_hook, fp16_compress_hook
from dure.parallel.ddp.step_times import BucketClock
from dure.parallel.ddp.validation import trained_parameters
from dure.torch_private import pytree
from dure.trace import logs
from dure.training.agreement import broadcast_tensors, describe_tensor, verify_equal

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.buffers import BufferSync
    from dure.parallel.ddp.comm_hooks import CommHook
    from dure.parallel.ddp.reducer import Reducer

__all__ = [  # the underscored ones are torch's own names
    "BuiltinCommHookType",
    "Report",
    "TorchNames",
    "_sync_module_states",
    "_verify_param_shape_across_processes",
    "sync_module_states",
    "verify_shapes",
]

_log = logs.logger("parallel")

_BROADCAST_BUCKET_BYTES = 250 << 20
_ALWAYS_SAMPLED = 10
_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double"}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")


class BuiltinCommHookType(Enum):
    """Communication hooks that torch has in C++, and `register_comm_hook` in Python.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ```
    """

    ALLREDUCE = auto()
    """Averages, as without a hook."""
    FP16_COMPRESS = auto()
    """Averages in 16 bits: `fp16_compress_hook`."""


class Report:
    """DDP's logging data: how the module was wrapped, samples of steps, and the last error.

    Args:
        settings: How the module was wrapped; this never changes.
    """

    def __init__(self, settings: dict[str, object]) -> None:
        self.sample_rate = 100
        self._settings = settings
        self._error = ""
        self._samples: dict[str, object] = {"iteration": 0}
        self._sums = [0, 0, 0, 0]
        self._num_samples = 0

    def failed(self, what: str, *, seen: str = "", fix: str = "") -> ModuleError:
        """Make the error `what`, and keep it in the data."""
        error = ModuleError(what, seen=seen, fix=fix)
        self.keep(error)
        return error

    def keep(self, error: Exception) -> None:
        """Keep an error in the data; it is the last one that counts."""
        self._error = str(error)

    def sample(self, iteration: int, clock: BucketClock) -> None:
        """Take down the times of a finished step: the first ten, then one in `sample_rate`."""
        if iteration >= _ALWAYS_SAMPLED and iteration % self.sample_rate:
            return
        times = clock.times()
        spans = [
            max(1, clock.backward_start - clock.forward),
            max(1, clock.backward_end - clock.backward_start),
            max(1, clock.comm_end - clock.comm_start),
            int(times.overlap_s * 1e9),
        ]
        _log.debug(
            "DistributedDataParallel, step %d: forward %.2f ms, backward %.2f ms, communication "
            "%.2f ms, of which %.2f ms beside backward",
            *(iteration, *(span / 1e6 for span in spans)),
        )
        self._num_samples += 1
        self._sums = [total + span for total, span in zip(self._sums, spans, strict=True)]
        names = (
            "forward_compute_time",
            "backward_compute_time",
            "backward_comm_time",
            "backward_compute_comm_overlap_time",
        )
        self._samples = {
            "iteration": iteration,
            **dict(zip(names, spans, strict=True)),
            **{
                f"avg_{name}": total // self._num_samples
                for name, total in zip(names, self._sums, strict=True)
            },
            "forward_compute_time_start": clock.forward,
            "backward_compute_time_start": clock.backward_start,
            "backward_compute_time_end": clock.backward_end,
            "backward_comm_time_start": clock.comm_start,
            "backward_comm_time_end": clock.comm_end,
        }

    def data(self, reducer: Reducer) -> dict[str, object]:
        """Return all of it."""
        return {
            **self._settings,
            **_environment(),
            **_bucketing(reducer),
            **self._samples,
            "has_error": int(bool(self._error)),
            "error": self._error,
        }


def _environment() -> dict[str, object]:
    return {name.lower(): env.text(name, "N/A") for name in _VARIABLES}


def _bucketing(reducer: Reducer) -> dict[str, object]:
    """Describe the buckets; parameters are numbered in the order of registration."""
    sizes = [view.size for view in reducer.all_views]
    dtypes = {view.parameter.dtype for view in reducer.all_views}
    data: dict[str, object] = {
        "world_size": reducer.group.size(),
        "rank": reducer.group.rank(),
        "backend_name": reducer.group.backend_name,
        "num_parameter_tensors": len(sizes),
        "total_parameter_size_bytes": sum(sizes),
        "dtypes": ", ".join(sorted(_DTYPE_NAMES.get(d, str(d)[6:]) for d in dtypes)),
        "bucket_sizes": _listed(reducer.first_sizes),
        "find_unused_parameters": int(reducer.allow_unused),
        "has_rebuilt_buckets": int(reducer.rebuilt),
    }
    if reducer.reductions.hook is not None or reducer.num_reduced:
        data["comm_hook"] = reducer.hook_name
    if reducer.num_reduced:
        data["can_set_static_graph"] = int(reducer._ddp_graph_static())  # pyright: ignore
        data["num_buckets_reduced"] = sum(1 for bucket in reducer.buckets if bucket.views)
        data["prev_iteration_grad_ready_order_indices"] = _listed(reducer.ready_order)
    if reducer.rebuilt:
        data["rebuilt_bucket_sizes"] = _listed(reducer.assignment.bucket_sizes())
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(view.number) for view in bucket.views) for bucket in reducer.buckets
        )
    return data


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


class TorchNames:
    """The part of `DistributedDataParallel` that has torch's semi-private names."""

    module: torch.nn.Module
    process_group: ProcessGroup
    parameters_to_ignore: set[str]
    static_graph: bool
    dim: int
    forward_sync_buffers: bool
    _report: Report
    _buffer_sync: BufferSync | None
    _reducer: Reducer | None

    broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
    """Accepted where torch's functions ask for it; tensors are not divided here."""

    _active_ddp_module: Any = None
    """What compiling.py sets on torch's class, where a program has put ours in its place."""

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    if TYPE_CHECKING:

        @property
        def reducer(self) -> Reducer:
            """See `DistributedDataParallel`."""
            ...

        def _take_hook(self, state: object, hook: CommHook, name: str) -> None: ...

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """The kind of device that the module is on."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether parameters are on several devices."""
        return len({p.device for p in self.module.parameters()}) > 1

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are kept equal, in their present state, by their paths."""
        return self._buffer_sync.named_buffers() if self._buffer_sync else {}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are kept equal, in their present state."""
        return list(self.named_module_buffers.values())

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Divide arguments over devices, as torch's; nothing here calls it."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move arguments to a device; returns one tuple of each, as torch's."""
        device = torch.device(self.device_type, device_id)
        return tuple(
            (pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), given),)
            for given in (inputs, kwargs or {})
        )

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Join the outputs of devices, as torch's; nothing here calls it."""
        return gather(outputs, output_device, dim=self.dim)

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Have these parameters and buffers, by their paths, stay each rank's own.

        Raises:
            ModuleError: There are no such.
        """
        names = set(params_and_buffers_to_ignore)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if unknown := sorted(names - named.keys()):
            raise ModuleError(
                "there are no such parameters and buffers to ignore",
                parameters=tuple(unknown),
                seen=", ".join(unknown),
                fix="Give paths as module.named_parameters() does, before wrapping the module.",
            )
        module._ddp_params_and_buffers_to_ignore = names  # pyright: ignore
        for name in names:
            named[name]._ddp_ignored = True  # pyright: ignore

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Have `hook(state, {name: buffer})` keep the buffers equal, instead of the broadcast.

        Raises:
            UsageError: `hook` cannot be called.
        """
        if not callable(hook):
            raise self._report.failed(
                "a buffer hook must be callable", seen=f"a {type(hook).__name__}"
            )
        if self._buffer_sync is not None:
            location = BufferHookLocation[comm_hook_location.name]  # torch's own enum has the names
            self._buffer_sync.register(state, hook, location)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register one of the hooks that torch has in C++ (its own enum is taken as well)."""
        hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
        self._take_hook(None, hooks[comm_hook_type.name], str(comm_hook_type))

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        if bufs is None:
            bufs = list(self._buffer_sync.named_buffers().values()) if self._buffer_sync else ()
        with torch.no_grad():
            broadcast_tensors(self.process_group, bufs, authoritative_rank)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        trained = trained_parameters(self.module, self.parameters_to_ignore)
        return [p.parameter for p in trained], [False] * len(trained)

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> dict[int, str]:
        trained = trained_parameters(self.module, self.parameters_to_ignore)
        numbers = {parameter: i for i, parameter in enumerate(parameters)}
        for p in trained:
            if p.parameter not in numbers:
                raise self._report.failed(f"Param with name {p.name} is not among the parameters")
        if len(parameters) != len(trained):
            raise self._report.failed(
                "Expected param to name mapping to have as many names as there are parameters",
                seen=f"{len(trained)} names for {len(parameters)} parameters",
            )
        return {numbers[p.parameter]: p.name for p in trained}

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Continue with another group; the next forward makes new buckets, collectively."""
        self.process_group = new_process_group
        self._reducer = self._buffer_sync = None

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never copied here, so there is nothing to set."""

    def _set_static_graph(self) -> None:
        """Say that all steps use the same parameters; before the first step only."""
        if self.reducer.num_reduced:
            raise self._report.failed(
                "_set_static_graph() should be called before training loop starts",
                seen=f"{self.reducer.num_reduced} steps have been made",
                fix="Pass static_graph=True at construction.",
            )
        self.static_graph = True
        self.reducer.set_static_graph()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._report.sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, object]:
        return self._report.data(self.reducer)

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        """Go through the parameters that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter


def verify_shapes(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], logger: object = None
) -> None:
    """Raise on all ranks unless all have tensors of the same shapes and dtypes, in this order.

    Args:
        process_group: The ranks that take part; all of them call.
        tensors: A module's parameters, usually.
        logger: Accepted for compatibility.

    Raises:
        ModuleError: With the first difference, and what each rank has there.
    """
    verify_equal(process_group, [describe_tensor(f"tensor {i}", t) for i, t in enumerate(tensors)])


def sync_module_states(
    module: torch.nn.Module,
    process_group: ProcessGroup,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Iterable[str],
    broadcast_buffers: bool = True,
) -> None:
    """Give all ranks' modules the values of the rank `src`.

    Args:
        module: The module.
        process_group: The ranks that take part; all of them call.
        broadcast_bucket_size: Accepted for compatibility.
        src: The rank whose values count.
        params_and_buffers_to_ignore: Names of tensors to leave alone.
        broadcast_buffers: Whether buffers are sent too.
    """
    ignored = set(params_and_buffers_to_ignore)
    named = dict(module.named_parameters())
    if broadcast_buffers:
        named |= dict(module.named_buffers())
    with torch.no_grad():
        kept = [t for name, t in named.items() if name not in ignored]
        broadcast_tensors(process_group, kept, src)


_sync_module_states = sync_module_states
_verify_param_shape_across_processes = verify_shapes
