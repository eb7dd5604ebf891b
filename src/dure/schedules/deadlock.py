"""Proves that ranks never wait for each other for ever, before one of them runs.

The semantics, for lists with transfers and *unbuffered* (rendezvous) sends: a rank does its list in
order. A transfer ends when both its ends have been reached, its SEND by one rank and its RECV by
the other; and a rank goes on only then. With `batched`, the transfers that stand side by side in a
list, with nothing else between them, are posted together, as `batch_isend_irecv` does, and the rank
goes on when all of them have ended.

Each SEND has one RECV, so nothing that a rank could do is taken away by what another does: if one
order of execution reaches the end, all do. So running the lists once, without times, is a proof.
It takes time linear in the number of actions. A list without deadlock here has none with batches,
nor with buffered sends, nor with sends that nobody waits for: they only wait for less.

For a grid, which has no transfers, the same is shown of the data that ranks wait for.
"""

from __future__ import annotations

from dure.schedules.actions import Action, Schedule
from dure.schedules.execution import Wait, execute, refuse_waiting

__all__ = ["prove_no_deadlock"]


def prove_no_deadlock(schedule: Schedule, *, batched: bool = False) -> None:
    """Show that a valid schedule comes to its end, however fast each rank is.

    Args:
        schedule: A grid, or lists with transfers.
        batched: Transfers side by side are posted together.

    Raises:
        ScheduleError: It does not; `cycle` has the ranks that wait for each other.
    """
    if not schedule.has_transfers:
        execute(schedule, lambda _: 1.0, lambda _: 0.0)
        return
    run = _Rendezvous(schedule, batched)
    awake = list(range(len(schedule.ranks)))
    while awake:
        awake += run.advance(awake.pop())
    waits = {rank: run.wait(rank) for rank, missing in enumerate(run.missing) if missing}
    if waits:
        refuse_waiting(waits)


class _Rendezvous:
    """Where each rank is, and which ends of transfers wait for their other ends."""

    def __init__(self, schedule: Schedule, batched: bool) -> None:
        self.placement, self.batched = schedule.placement, batched
        self.lists = [schedule.actions(rank) for rank in range(len(schedule.ranks))]
        self.begin = [0] * len(self.lists)  # of the batch at hand
        self.end = [0] * len(self.lists)
        self.missing = [0] * len(self.lists)  # ends of it whose other end has not been reached
        self.posted: dict[Action, int] = {}  # such an end -> its rank

    def advance(self, rank: int) -> list[int]:
        """Run a rank until a batch of it waits; return the ranks that no longer wait."""
        woken: list[int] = []
        actions = self.lists[rank]
        while self.end[rank] < len(actions) and not self.missing[rank]:
            begin = end = self.end[rank]
            while end < len(actions) and actions[end].kind.is_transfer:
                woken += self._post(rank, actions[end])
                end += 1
                if not self.batched:
                    break
            self.begin[rank] = begin
            self.end[rank] = max(end, begin + 1)
        return [other for other in woken if other != rank]

    def _post(self, rank: int, action: Action) -> list[int]:
        other = self.posted.pop(action.other_end, None)
        if other is None:
            self.posted[action] = rank
            self.missing[rank] += 1
            return []
        self.missing[other] -= 1
        return [] if self.missing[other] else [other]

    def wait(self, rank: int) -> Wait:
        """Return the first end that a rank waits with."""
        batch = range(self.begin[rank], self.end[rank])
        actions = self.lists[rank]
        index = next(i for i in batch if self.posted.get(actions[i]) == rank)
        awaited = actions[index].other_end
        where = self.placement[awaited.stage] if 0 <= awaited.stage < len(self.placement) else -1
        return Wait(index, actions[index], awaited, where)
