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
from dure.parallel.ddp.replicas import BufferHook, BufferHookLocation, broadcast_packed
from dure.parallel.ddp.wrapping import trained_parameters

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.reducer import Reducer
    from dure.parallel.ddp.replicas import BufferSync
    from dure.parallel.ddp.report import Report

__all__ = ["BuiltinCommHookType", "TorchNames", "sync_module_states", "verify_shapes"]

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
    _report: Report
    _buffer_sync: BufferSync | None

    broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
    """Accepted where torch's functions ask for it; tensors are not divided here."""

    if TYPE_CHECKING:

        @property
        def reducer(self) -> Reducer:
            """See `DistributedDataParallel`."""
            ...

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
