"""Other names of `procs.forked_ranks`, until all have changed their imports."""

from procs.forked_ranks import Ranks as Crew
from procs.forked_ranks import Slot as Place

__all__ = ["Crew", "Place"]
