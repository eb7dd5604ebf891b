"""How a group of parameters is unsharded: one interface, two implementations.

*shared*: the ranks of a host have the parameters in memory that they share; a shard is a view into
it, and nothing is gathered (shared.py). *gathered*: the usual all_gather into memory of a rank's
own (gathered.py). `fully_shard` chooses (choosing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dure.comm.capture import has_no_values
from dure.comm.ops import ReduceOp
from dure.errors import PeerLost
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.streams import SideStreams

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work
    from dure.training.epochs import ModelEpochs

__all__ = ["Strategy"]


class Strategy:
    """Unshards one group's parameters; this base class works with this rank's copies.

    Args:
        parameters: Of one dtype.
        axes: Over which they are sharded.

    Attributes:
        name: "shared" or "gathered".
        why: Why it was chosen.
        frees: `reshard` frees the unsharded parameters, so that backward needs `unshard`.
        streams: Beside that of the computation, on a device that has streams.

    Collective:
        `unshard`, on all ranks of the group in the same order; `enter`.
    """

    name: str
    why: str = "asked for"
    frees: bool = True
    streams: SideStreams | None = None

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        self._parameters, self._axes = list(parameters), axes
        self._pending_gather: tuple[torch.Tensor, int, Work | None] | None = None

    def attach(self) -> None:
        """Take the shards that the parameters have now: first, and whenever some were replaced."""
        raise NotImplementedError

    def publish(self) -> None:
        """Put what others are to read where they read it; `enter` comes next."""
        self._finish_gather()  # what a step that failed has begun

    @property
    def is_current(self) -> bool:
        """Whether `unshard` shows what all ranks have written; else after `publish` and `enter`."""
        return True

    def is_stale(self, accumulates: bool = False) -> bool:
        """Whether any rank's shards were written since the kept unsharded parameters were made.

        Args:
            accumulates: Whether gradients are only being accumulated: no rank writes its shards, or
                all ranks do.

        Collective:
            All ranks of the group, unless `accumulates`.
        """
        return False

    def _differ_anywhere(self, versions: Sequence[int], accumulates: bool) -> bool:
        """Return whether any rank's shards have other versions now; see `is_stale`."""
        differ = [*versions] != [p.version for p in self._parameters]
        if accumulates:
            return differ
        flag = torch.tensor([differ], dtype=torch.int32, device=self._parameters[0].part.device)
        self._axes.shard_group.all_reduce(flag, ReduceOp.MAX)
        return differ if has_no_values((flag,)) else bool(flag.item())

    @property
    def begins_gather(self) -> bool:
        """Whether `unshard` would begin an all_gather."""
        return False

    def unshard(self) -> ProcessGroup | None:
        """Start to unshard the parameters; does nothing if they are unsharded, or will be soon.

        Returns:
            The group in which an all_gather was begun.
        """

    def _finish_gather(self) -> torch.Tensor | None:
        """Finish an all_gather that has begun; return what it has gathered, [ranks, k]."""
        if self._pending_gather is None:
            return None
        (output, ranks, work), self._pending_gather = self._pending_gather, None
        if work is not None:
            work.wait()
        return output.view(ranks, -1)

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the unsharded parameters [unsharded_shape]; always the same tensors."""
        raise NotImplementedError

    def reshard(self, for_backward: bool = False) -> None:
        """The unsharded parameters are not read until the next `unshard`.

        Args:
            for_backward: The next one is in this step's backward, so parts may be kept for it.
        """
        raise NotImplementedError

    def recomputed(self) -> Sequence[torch.Tensor]:
        """Return memory of this rank that `publish` rewrites before it is read."""
        return ()

    # ---------------------------------------------------------------- where others read the shards

    def begin_read(self, epochs: ModelEpochs) -> Sequence[FSDPParameter]:
        """Begin to read, unless begun: a root's forward, or a backward. Wait until all have.

        Args:
            epochs: Of the model, which ends the reading.

        Returns:
            The parameters whose shards this rank has written since it last entered. Autograd
            refuses what it has saved of them from now on.
        """
        return ()

    def gather_after_writes(self) -> None:
        """Let what is gathered from now on see what the current stream has still to write."""

    def release_shards(self) -> None:
        """Block the host until shards in its memory were copied: the program may write them."""

    def before_write(self) -> None:
        """Wait until shards may be written, where that is between no steps."""

    def check_unwritten(self) -> None:
        """Raise if shards were written since `enter`, where others read them."""

    def has_taken_gradient(self, parameter: FSDPParameter) -> None:
        """Note that a backward has this rank's gradient, and no longer reads the parameter."""

    @contextmanager
    def hooks_may_write(self, parameters: Sequence[FSDPParameter]) -> Iterator[None]:
        """Let hooks that run in the block, within a backward, write shards: an optimizer's step.

        Args:
            parameters: Whose gradients all ranks have computed.
        """
        yield

    def annotate(self, error: PeerLost) -> None:
        """Add to an error what a rank's death has left of the parameters."""
