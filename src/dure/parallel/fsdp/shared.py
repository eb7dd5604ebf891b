"""Strategy *shared*: the ranks of a host have a group's parameters in one block of memory.

    the host's memory   |  weight (whole)           |  bias  |
    rank 0's shard      |  rows 0..                 |  ...   |    each shard is a view of the block
    rank 1's shard              |  rows k..         |

Nothing is gathered: the whole parameter is a tensor over the block, on every rank. The host has
each parameter once. In a lower precision (`MixedPrecisionPolicy.param_dtype`) owners cast their
rows at each step into a second block, and the wholes lie there.

Ranks take turns (`Turns`), those of the model. One *enters* when a root's forward begins, or the
program unshards a module between steps, and waits for all: so what was written before is seen by
all. It *leaves* when backward has ended, or a forward without gradients, and waits until all have
left; or when the program has resharded: so a write of a shard between steps disturbs no rank. After
a forward with gradients that no backward followed, or a backward that keeps its graph, the
optimizer and `load_state_dict` wait likewise. These waits end as the group's calls do: a rank that
died is a `PeerLost`, which says whether the weights are complete; one that does not arrive a
`CommTimeout`. Before the first forward no rank reads, so no writer waits.

Wholes are not to be written: a module that does so in forward is refused, and the error names
*gathered*.

Note "Is a saved value stale?". A whole and this rank's shard are tensors over one memory, but each
has a version counter of its own. Whether a shard was written is asked whenever the rank enters, by
comparing the shard's version with that of the last time; if it was, the whole's version is
increased, and autograd refuses what it has saved of it, as for any tensor that was written in
place. Ranks run the same program, so where one of them writes, it is refused there.

Hooks of the program may write a shard within backward (an optimizer step per parameter): its
gradient is reduced by then, so all ranks have computed theirs. What is not over then is refused
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
from dure.training.memory import node_shared_zeros, piece_of, side_by_side
from dure.training.turns import Turns, TurnsOfModel, prepare

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
    if group.backend_name not in ("shm", "threads", "hybrid"):
        return f"ranks of the backend {group.backend_name} share no memory"
    return None


class Shared(Strategy):
    """Keeps a group's parameters whole, in memory that its ranks share.

    Args:
        parameters: Of one dtype, cut in dimension 0, on the CPU.
        axes: Over which they are sharded.
        group: The ranks that share memory, on one host; those of the shard axis where None.

    Collective: construction.
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
        self._turns: Turns | None = None
        kept, read = [p.spec.meta.dtype for p in parameters], [p.dtype for p in parameters]
        self._full = _Block(parameters, kept, axes, group)
        self._read = self._full if read == kept else _Block(parameters, read, axes, group)
        self._wholes = self._read.wholes
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
        """Mark a shard as shared; let optimizers wait for the turns, if any, before they write."""
        sharded._dure_turns = self._turns  # pyright: ignore

    def publish(self) -> None:
        """Take back shards that the program has put elsewhere; cast, where wholes are cast."""
        super().publish()
        self.attach()
        for low, full in zip(self.recomputed(), self._full.shards, strict=False):
            low.copy_(full)

    def enter(self, turns: TurnsOfModel) -> Sequence[FSDPParameter]:
        """Begin a step; see `Turns`, and the note "Is a saved value stale?"."""
        own = turns.of(self._group)
        if own is not self._turns:
            self._turns = own
            for parameter in self._parameters:
                self._mark(parameter.sharded)
        own.enter()
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
        """Let autograd refuse what it has saved of the wholes of `parameters`."""
        for parameter, whole in zip(self._parameters, self._wholes, strict=True):
            if parameter in parameters:
                torch.autograd.graph.increment_version(whole)
                parameter.has_changed()  # has the same counter, unless it is a DTensor
        if self._versions:  # kept whole since an earlier forward
            self._versions = [whole._version for whole in self._wholes]

    def has_taken_gradient(self, parameter: FSDPParameter) -> None:
        """Have autograd refuse to read the whole from now on, if hooks may write the shard."""
        if parameter.has_hooks and not autograd_hooks.keeps_graph():
            self._have_changed([parameter])

    @contextmanager
    def hooks_may_write(self, parameters: Sequence[FSDPParameter]) -> Iterator[None]:
        """Have an optimizer write at once, without waiting for the end of the ranks' backwards."""
        assert self._turns is not None
        with self._turns.writing_in_step():
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
        return self._turns is not None and self._turns.is_reading

    def before_write(self) -> None:
        """Wait until no rank reads; see `Turns`."""
        if self._turns is not None:
            self._turns.begin_write()

    def recomputed(self) -> Sequence[torch.Tensor]:
        """Return this rank's rows of the low-precision block."""
        return () if self._read is self._full else self._read.shards

    def tell(self, error: PeerLost) -> None:
        """Add to an error whether the weights are complete."""
        if self._turns is not None:
            self._turns.tell(error)

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the wholes."""
        self._versions = [whole._version for whole in self._wholes]
        return self._wholes

    def reshard(self, for_backward: bool = False) -> None:
        """See that nobody has written the wholes.

        Raises:
            ModuleError: One was written; it is named.
        """
        for parameter, whole, version in zip(
            self._parameters, self._wholes, self._versions, strict=False
        ):
            if whole._version != version:
                self._versions = []
                raise _written(parameter)
        self._versions = []


def _written(parameter: FSDPParameter) -> ModuleError:
    return ModuleError(
        "a parameter that ranks share was written in forward or backward",
        op="fully_shard",
        parameters=(parameter.name,),
        seen=f"{parameter.name} {list(parameter.whole_shape)}",
        fix='Write it between steps; or shard the module within `with fsdp.strategy("gathered"):`.',
    )


class _Block:
    """Memory that the ranks of a host share, with parameters whole.

    Attributes:
        wholes: [whole_shape] each.
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
        shapes = [p.whole_shape for p in parameters]
        *starts, nbytes = side_by_side(
            shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        files, nbytes = parameters[0].files, max(nbytes, 1)
        if files is None:
            self._memory = node_shared_zeros(group, nbytes)
        else:
            self._memory = files.shared_zeros(group, nbytes)
        self._starts = starts
        self.wholes = [
            _over(self._memory, start, shape, dtype)
            for shape, dtype, start in zip(shapes, dtypes, starts, strict=True)
        ]
        self.shards = self.rows_of(axes.rank)

    def rows_of(self, rank: int) -> list[torch.Tensor]:
        """Return the rows that a rank has of each parameter."""
        rows: list[torch.Tensor] = []
        for whole, start in zip(self.wholes, self._starts, strict=True):
            size, offset = chunk(whole.shape[0], self._axes.size, rank)
            begin = start + offset * whole.shape[1:].numel() * whole.itemsize
            shape = torch.Size((size, *whole.shape[1:]))
            rows.append(_over(self._memory, begin, shape, whole.dtype))
        return rows


def _over(memory: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    room = piece_of(memory, start, shape.numel() * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(room, 0, shape)  # pyright: ignore
