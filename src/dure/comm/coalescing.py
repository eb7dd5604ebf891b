"""The coalescing manager: operations that are started together, and waited for together."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch

from dure.comm.group import ProcessGroup
from dure.comm.work import Work, combine
from dure.comm.world import resolve
from dure.errors import UsageError


class Coalesced:
    """The operations that were started in a coalescing manager.

    Obtained from:
        The context of `coalescing_manager`.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        """Wait for all of them; the first error is raised."""
        combine(self.works, [], False)


class _CoalescingManager(AbstractContextManager[Coalesced, None]):
    """The context manager; a generator would hide the program's call site."""

    def __init__(self, group: ProcessGroup, async_ops: bool) -> None:
        self._group, self._async_ops = group, async_ops
        self._hold, self._yielded = group.hold("coalescing_manager"), Coalesced()

    def __enter__(self) -> Coalesced:
        pg = self._group
        with ExitStack() as entered:
            entered.enter_context(self._hold)
            if pg.coalesced is not None:
                raise UsageError(
                    "coalescing managers of one group cannot be nested", group=pg.group_name
                )
            self._together = pg.together(None)
            self._together.__enter__()
            entered.pop_all()  # `__exit__` leaves them
        pg.coalesce(self._yielded.works, waits=not self._async_ops)
        return self._yielded

    def __exit__(self, *error: object) -> None:
        try:
            self._group.coalesce(None)
            try:
                self._together.__exit__(None, None, None)
            except BaseException:
                self._disown()
                raise
            if error[0] is not None:
                self._disown()
            elif not self._async_ops:
                self._yielded.wait()
        finally:
            self._hold.__exit__()

    def _disown(self) -> None:
        """Expect no waits for the operations: the program gets an error in place of them."""
        for work in self._yielded.works:
            work.disown()


def coalescing_manager(
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> AbstractContextManager[Coalesced]:
    """Start the operations called in the block without waiting, and wait for all at its end.

    Over NCCL the operations are one launch, which starts when the block ends. Collectives with
    nothing to gain from that, those of ranks on one host in shared memory, run at once. Until the
    block ends, other threads cannot call collectives of the group, as during one operation.

    Args:
        group: The group whose operations are held; others are not touched. The default group if
            None.
        device: Accepted for torch's sake, and ignored.
        async_ops: Whether to leave the waiting to the caller (`.wait()` of the yielded object).

    Returns:
        A context manager that yields the operations that were started in it.

    Raises:
        UsageError: Managers of one group were nested, or another thread was inside a call.
        CommError: One of the operations failed.

    Collective:
        As the operations within: all ranks, in the same order.

    Example:
        ```python
        tensors = [torch.ones(2), torch.ones(3)]
        with dist.coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert tensors[1].tolist() == [2.0, 2.0, 2.0]  # on 2 ranks
        ```
    """
    return _CoalescingManager(resolve(group, "coalescing_manager"), async_ops)
