"""How an elastic job behaves: the choices of `dure.elastic.run`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dure.store.base import Store

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an elastic job behaves.

    Attributes:
        min_ranks: With fewer ranks the job ends; `dure run --min-ranks` where None, or 1.
        quorum: Of a job whose network is cut, only the part with the quorum goes on;
            `dure run --rdzv-conf quorum=0` where None, or yes.
        timeout: How long an operation waits for its peers, and survivors for each other. So long a
            rank that neither works nor dies (one that is stopped) holds up the job.
        enough_s: How long too few ranks wait for more to come.
        backend: As `init_process_group`.
        store: A store that all ranks share, in place of the launcher's; then `rank` and
            `world_size` must be given.
        rank: This process's number, where the environment does not tell it.
        world_size: How many ranks start.
    """

    min_ranks: int | None = None
    quorum: bool | None = None
    timeout: timedelta = timedelta(minutes=5)
    enough_s: float = 30.0
    backend: str | None = None
    store: Store | None = None
    rank: int = -1
    world_size: int = -1
