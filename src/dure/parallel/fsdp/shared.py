"""Strategy *shared*: the ranks of a host have a group's parameters in one block of memory.

        the host's memory   |  weight (unsharded)       |  bias  |
    rank 0's shard      |  rows 0..                 |  ...   |    each shard is a view of the block
    rank 1's shard              |  rows k..         |

Nothing is gathered: the unsharded parameter is a tensor over the block, on every rank. The host has
each parameter once. In a lower precision (`MixedPrecisionPolicy.param_dtype`) owners cast their
rows at each step into a second block, which holds the unsharded parameters.

Epochs (`Epochs`), those of the model, separate readers and writers. A rank *begins to read* when a
root's forward begins, or the program unshards a module between steps, and waits for all ranks: so
all see what was written before. It *ends reading* when backward has ended, or a forward without
gradients, and waits until all ranks have; or, without waiting, when the program has resharded: then
the optimizer and `load_state_dict` wait for the other ranks, and plain writes do not. So it is
after a forward with gradients that no backward followed, and a backward that keeps its graph.
These waits end as the group's calls do: a rank that died is a `PeerLost`, which says whether the
weights are complete; one that does not arrive a `CommTimeout`. Before the first forward no rank
reads, so no writer waits.

Unsharded parameters must not be written: a module that does so in forward is refused, and the error
names *gathered*.

Note "Is a saved value stale?". An unsharded parameter and this rank's shard are tensors over one
memory, but each has its own version counter. Each time that the rank begins to read, it compares
the shard's version with the last one; if the shard was written, the unsharded version is
increased, and autograd refuses what it has saved of it, as for any tensor that was written in
place. Ranks run the same program, so where one of them writes, it is refused there.

Hooks of the program may write a shard within backward (an optimizer step per parameter): its
gradient is reduced by then, so all ranks have computed theirs. Later reads are refused
like other writes (`has_taken_gradient`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import ModuleError, PeerLost
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.strategy import Strategy
from dure.tensor.placement_types import chunk
from dure.training import autograd_hooks
from dure.training.epochs import Epochs, ModelEpochs, prepare
from dure.training.memory import node_shared_zeros, piece_of, side_by_side

if TYPE_CHECKING:
    from torch import nn

    from dure.comm.group import ProcessGroup

__all__ = ["Shared", "why_not_shared"]


def why_not_shared(parameters: Sequence[FSDPParameter], axes: DataAxes) -> str | None:
    """Return why a group cannot be in memory that its ranks share; None if it can."""
    group = axes.shard_group
    for parameter in parameters:
        if parameter.dim != 0:
            return f"{parameter.name} is cut in dimension {parameter.dim}"
        if type(parameter.part) is not torch.Tensor:
            return f"{parameter.name} is a {type(parameter.part).__name__}"
        if parameter.part.device.type not in ("cpu", "meta"):
            return f"{parameter.name} is on {parameter.part.device}"
    if axes.mesh.device_type != "cpu":
        return f"its mesh has devices of type {axes.mesh.device_type}"
    if group.backend_of("cpu") not in ("shm", "threads", "hybrid"):
        return f"ranks of the backend {group.backend_name} share no memory"
    return None


class Shared(Strategy):
    """Keeps a group's unsharded parameters in memory that its ranks share.

    Args:
        parameters: Of one dtype, cut in dimension 0, on the CPU.
        axes: Over which they are sharded.
        group: The ranks that share memory, on one host; those of the shard axis where None.

    Collective:
        Construction.
    """

    name = "shared"
    why = "CPU parameters, ranks on one host"
    frees = False

    def __init__(
        self,
        parameters: Sequence[FSDPParameter],
        axes: DataAxes,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, axes)
        self._group = group = group or axes.shard_group
        self._signals = prepare(group)
        self._epochs: Epochs | None = None
        kept, read = [p.spec.meta.dtype for p in parameters], [p.dtype for p in parameters]
        self._full = _Block(parameters, kept, axes, group)
        self._read = self._full if read == kept else _Block(parameters, read, axes, group)
        self._unsharded = self._read.unsharded
        self._versions: list[int] = []
        self._seen: dict[FSDPParameter, int | None] = dict.fromkeys(parameters)
        self.attach()

    def attach(self) -> None:
        """Put the shards into the block, with the values they have."""
        waited = False
        for parameter, place in zip(self._parameters, self._full.shards, strict=True):
            sharded: Any = parameter.sharded
            part = sharded.part
            self._mark(sharded)
            if part is place or part.is_meta:
                continue
            if not waited:  # also a rank without rows, as the others wait for it
                waited = True
                self.before_write()
            if part.data_ptr() != place.data_ptr() and place.numel():
                place.copy_(part.detach())
                self._seen[parameter] = None
            sharded.part = place

    def _mark(self, sharded: nn.Parameter) -> None:
        """Mark a shard as shared; let optimizers wait until no rank reads."""
        sharded._dure_epochs = self._epochs  # pyright: ignore

    def publish(self) -> None:
        """Move shards that the program has put elsewhere back; cast the rows for computation."""
        super().publish()
        self.attach()
        for low, full in zip(self.recomputed(), self._full.shards, strict=False):
            low.copy_(full)

    def begin_read(self, epochs: ModelEpochs) -> Sequence[FSDPParameter]:
        """Begin a step; see `Epochs`, and the note "Is a saved value stale?"."""
        own = epochs.of(self._group)
        if own is not self._epochs:
            self._epochs = own
            for parameter in self._parameters:
                self._mark(parameter.sharded)
        own.begin_read()
        return [p for p in self._parameters if self._is_stale(p)]

    def _is_stale(self, parameter: FSDPParameter) -> bool:
        """Return whether a shard was written since it was last asked; let autograd know."""
        version = parameter.version
        if version == self._seen[parameter]:
            return False
        self._seen[parameter] = version
        self._have_changed([parameter])
        return True

    def _have_changed(self, parameters: Sequence[FSDPParameter]) -> None:
        """Let autograd refuse what it has saved of the unsharded `parameters`."""
        for parameter, unsharded in zip(self._parameters, self._unsharded, strict=True):
            if parameter in parameters:
                torch.autograd.graph.increment_version(unsharded)
                parameter.has_changed()  # has the same counter, unless it is a DTensor
        if self._versions:  # unsharded since an earlier forward
            self._versions = [unsharded._version for unsharded in self._unsharded]

    def has_taken_gradient(self, parameter: FSDPParameter) -> None:
        """Have autograd refuse later reads of the parameter if hooks may write the shard."""
        if parameter.has_hooks and not autograd_hooks.keeps_graph():
            self._have_changed([parameter])

    @contextmanager
    def hooks_may_write(self, parameters: Sequence[FSDPParameter]) -> Iterator[None]:
        """Have an optimizer write at once, without waiting for the end of the ranks' backwards."""
        assert self._epochs is not None
        with self._epochs.writing_in_step():
            yield
        for parameter in parameters:
            self._is_stale(parameter)

    def check_unwritten(self) -> None:
        """See that this rank has not written its shards while the others may read them.

        Raises:
            ModuleError: It has written one, which is named.
        """
        for parameter, version in self._seen.items():
            if version is not None and parameter.version != version:
                raise _written(parameter)

    @property
    def is_current(self) -> bool:
        """Whether all ranks read, and so have written what they wrote."""
        return self._epochs is not None and self._epochs.is_reading

    def before_write(self) -> None:
        """Wait until no rank reads; see `Epochs`."""
        if self._epochs is not None:
            self._epochs.begin_write()

    def recomputed(self) -> Sequence[torch.Tensor]:
        """Return this rank's rows of the low-precision block."""
        return () if self._read is self._full else self._read.shards

    def annotate(self, error: PeerLost) -> None:
        """Add to an error whether the weights are complete."""
        if self._epochs is not None:
            self._epochs.annotate(error)

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the unsharded parameters."""
        self._versions = [unsharded._version for unsharded in self._unsharded]
        return self._unsharded

    def reshard(self, for_backward: bool = False) -> None:
        """Check that the unsharded parameters were not written.

        Raises:
            ModuleError: One was written; it is named.
        """
        for parameter, unsharded, version in zip(
            self._parameters, self._unsharded, self._versions, strict=False
        ):
            if unsharded._version != version:
                self._versions = []
                raise _written(parameter)
        self._versions = []


def _written(parameter: FSDPParameter) -> ModuleError:
    return ModuleError(
        "a parameter that ranks share was written in forward or backward",
        op="fully_shard",
        parameters=(parameter.name,),
        seen=f"{parameter.name} {list(parameter.unsharded_shape)}",
        fix='Write it between steps; or shard the module within `with fsdp.strategy("gathered"):`.',
    )


class _Block:
    """Memory that the ranks of a host share, with unsharded parameters.

    Attributes:
        unsharded: [unsharded_shape] each.
        shards: This rank's rows of each.
    """

    def __init__(
        self,
        parameters: Sequence[FSDPParameter],
        dtypes: Sequence[torch.dtype],
        axes: DataAxes,
        group: ProcessGroup,
    ) -> None:
        self._axes = axes
        shapes = [p.unsharded_shape for p in parameters]
        *starts, nbytes = side_by_side(
            shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        files, nbytes = parameters[0].files, max(nbytes, 1)
        if files is None:
            self._memory = node_shared_zeros(group, nbytes)
        else:
            self._memory = files.shared_zeros(group, nbytes)
        self._starts = starts
        self.unsharded = [
            _over(self._memory, start, shape, dtype)
            for shape, dtype, start in zip(shapes, dtypes, starts, strict=True)
        ]
        self.shards = self.rows_of(axes.rank)

    def rows_of(self, rank: int) -> list[torch.Tensor]:
        """Return the rows that a rank has of each parameter."""
        rows: list[torch.Tensor] = []
        for unsharded, start in zip(self.unsharded, self._starts, strict=True):
            size, offset = chunk(unsharded.shape[0], self._axes.size, rank)
            begin = start + offset * unsharded.shape[1:].numel() * unsharded.itemsize
            shape = torch.Size((size, *unsharded.shape[1:]))
            rows.append(_over(self._memory, begin, shape, unsharded.dtype))
        return rows

    def bytes_of(self, number: int) -> torch.Tensor:
        """Return the memory of an unsharded parameter; writes to it do not change its version."""
        shape = torch.Size([self.unsharded[number].nbytes])
        return _over(self._memory, self._starts[number], shape, torch.uint8)


def _over(memory: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    room = piece_of(memory, start, shape.numel() * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(room, 0, shape)  # pyright: ignore
