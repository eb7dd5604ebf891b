"""What programs use of torch's DDP although its name begins with an underscore.

Libraries on top of torch (trainers, recommenders, profilers) call these methods, and a program that
is moved over with its import changed shall find them. Each is a line or two over the parts that do
the work; what of torch's has no meaning here is in docs/ddp.md, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.agreement import describe_tensor, verify_equal
from dure.errors import ModuleError
from dure.parallel.ddp.hooks.default_hooks import allreduce_hook, fp16_compress_hook
from dure.parallel.ddp.replicas import BufferHook, BufferHookLocation, broadcast_packed
from dure.parallel.ddp.wrapping import trained_parameters

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.hooking import CommHook
    from dure.parallel.ddp.reducer import Reducer
    from dure.parallel.ddp.replicas import BufferSync
    from dure.parallel.ddp.report import Report

__all__ = [  # the underscored ones are torch's own names
    "BuiltinCommHookType",
    "TorchNames",
    "_sync_module_states",
    "_verify_param_shape_across_processes",
    "sync_module_states",
    "verify_shapes",
]

_BROADCAST_BUCKET_BYTES = 250 << 20


class BuiltinCommHookType(Enum):
    """Communication hooks that torch has in C++, and `register_comm_hook` in Python."""

    ALLREDUCE = auto()
    """Averages: what happens without a hook."""
    FP16_COMPRESS = auto()
    """Averages in 16 bits: `fp16_compress_hook`."""


class TorchNames:
    """The part of `DistributedDataParallel` that has torch's semi-private names."""

    module: torch.nn.Module
    process_group: ProcessGroup
    parameters_to_ignore: set[str]
    static_graph: bool
    forward_sync_buffers: bool
    _report: Report
    _buffer_sync: BufferSync | None
    _reducer: Reducer | None

    broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
    """Accepted where torch's functions ask for it; tensors are not divided here."""

    _active_ddp_module: Any = None
    """What compiling.py sets on torch's class (Any), where a program has put ours in its place."""

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
        """The buffers that are kept alike, as they are now, by their paths."""
        return self._buffer_sync.named_buffers() if self._buffer_sync else {}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are kept alike, as they are now."""
        return list(self.named_module_buffers.values())

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
        """Have `hook(state, {name: buffer})` keep the buffers alike, instead of the broadcast.

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
            broadcast_packed(self.process_group, bufs, authoritative_rank)

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
        """Go on with another group; buckets are made anew by the next forward, collectively."""
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
        """Go through the parameters that are not ignored (Any: with their names or without)."""
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
        broadcast_packed(process_group, kept, src)


_sync_module_states = sync_module_states
_verify_param_shape_across_processes = verify_shapes
