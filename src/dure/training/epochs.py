"""Epochs of memory that the ranks of a host share: no rank reads what another one writes.

A rank calls `begin_read` before it reads, and waits until all ranks have: so each sees what was
written before. It calls `end_read` when it no longer reads. A writer waits until all ranks have,
and notes when it begins and ends, so that survivors of its death know which rows are complete.
These waits end as the group's calls do: a rank that died is a `PeerLost`, one that does not arrive
a `CommTimeout`. `csrc/tests/test_epochs.cpp` drills the order of these steps, under the thread
sanitizer too.

Each model has its own epochs (`ModelEpochs`), not each process group: the end of one model's step
must not count as the end of another's that is still being read, and a model that a rank reads
without end (a forward with gradients, and no backward) must not keep writers of other models
waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dure import symmetric_memory
from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp
from dure.comm.signals import Signals, bytes_of_signals, signals_in
from dure.errors import CommTimeout, PeerLost
from dure.training.memory import node_shared_zeros

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Epochs", "ModelEpochs", "end_read_all", "prepare"]


def prepare(group: ProcessGroup) -> Signals:
    """Have the ranks of a group find each other's memory, so that making `Epochs` sends nothing.

    Returns:
        Signals between the ranks, those of the group.

    Collective:
        The first time, all ranks of the group.
    """
    if Signals not in group.belongings:
        tensor = heap_empty(1)  # not the program's, so no warning at a fork
        group.belongings[Signals] = symmetric_memory.rendezvous(tensor, group)
    return group.belongings[Signals]


class Epochs:
    """Readers and writers of the parameters of one model that the ranks of a group share.

    Counters `wrote` are odd while a rank writes, so that survivors of a death know whose rows are
    incomplete.

    Collective:
        Construction, `begin_read`.

    Threads:
        One per rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        known, counters = prepare(group), 8 * group.size()
        memory = node_shared_zeros(group, counters + bytes_of_signals(group.size()))
        self._wrote = memory[:counters].view(torch.int64)
        self._signals = known if group.size() == 1 else signals_in(memory[counters:], known)
        self._group, self._group_name = group, group.group_name
        self._token = torch.zeros(
            5, dtype=torch.uint8, device="cpu"
        )  # a program would not reduce 5 bytes
        self._rank, self._peers = (
            group.rank(),
            [r for r in range(group.size()) if r != group.rank()],
        )
        self._reading = self._writes_in_step = False
        self._awaited: list[int] = []  # peers that may still read after this rank's `end_read`

    @property
    def is_reading(self) -> bool:
        """Whether this rank has called `begin_read`, and not `end_read`."""
        return self._reading

    def begin_read(self) -> None:
        """Wait until all ranks have called this, and so have finished their writes."""
        if self._reading:
            return
        self._await_readers()
        self.end_write()
        # A collective, so that ranks which call a different one get an error at once.
        self._group.all_reduce(self._token, ReduceOp.BXOR)
        self._reading = True

    def end_read(self, together: bool) -> None:
        """Signal that this rank no longer reads; with `together`, wait until no rank does."""
        if self._reading:
            self._reading, self._awaited = False, [*self._peers]
            for peer in self._peers:
                self._signals.put_signal(peer)
        if together:
            self._await_readers()

    @contextmanager
    def writing_in_step(self) -> Iterator[None]:
        """Have `begin_write` in a block not wait; this rank continues to read after it.

        For writes of parameters that no rank reads again in this step.
        """
        self._writes_in_step = True
        try:
            yield
        finally:
            self._writes_in_step = False
            self.end_write()

    def begin_write(self) -> None:
        """Wait until no rank reads; note that this rank writes."""
        if not self._writes_in_step:
            self.end_read(together=True)
        if int(self._wrote[self._rank]) % 2 == 0:
            self._wrote[self._rank] += 1

    def end_write(self) -> None:
        """Note that this rank's writes are complete."""
        if int(self._wrote[self._rank]) % 2:
            self._wrote[self._rank] += 1

    def torn_ranks(self) -> list[int]:
        """Return the other ranks that write; after a death their rows are incomplete."""
        return [peer for peer in self._peers if int(self._wrote[peer]) % 2]

    def annotate(self, error: PeerLost) -> None:
        """Add to an error whether the weights are complete."""
        torn = self.torn_ranks()
        note = "The weights that the ranks share are complete: no rank was writing them."
        if torn:
            note = (
                f"Rows of the weights that ranks {torn} of {self._group_name!r} were writing are "
                "incomplete: load them from a checkpoint."
            )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _await_readers(self) -> None:
        while self._awaited:  # also those of a wait that was interrupted
            peer = self._awaited[-1]
            try:
                self._signals.wait_signal(peer)
            except CommTimeout as error:
                error.add_note(
                    f"Rank {peer} has not finished the step of this model that rank {self._rank} "
                    "has finished. All ranks that share parameters must run the model together; "
                    "run an evaluation on all of them."
                )
                raise
            self._awaited.pop()


class ModelEpochs:
    """The epochs of one model, by process group: different ranks may share parts of a model."""

    def __init__(self) -> None:
        self._of: dict[ProcessGroup, Epochs] = {}

    def of(self, group: ProcessGroup) -> Epochs:
        """Return the epochs of a group.

        Collective:
            The first time, all ranks of the group.
        """
        epochs = self._of.get(group)
        if epochs is None:
            with torch.inference_mode(False):  # the first forward may run in inference mode
                epochs = self._of[group] = Epochs(group)
        return epochs

    def end_read(self, together: bool) -> None:
        """End reading; see `Epochs.end_read`."""
        end_read_all(self._of.values(), together)


def end_read_all(epochs: Collection[Epochs], together: bool) -> None:
    """End reading of several, and only then wait: other ranks wait in any order."""
    for each in epochs:
        each.end_read(together=False)
    if together:
        for each in epochs:
            each.end_read(together=True)
