"""Another name of `procs.forked_ranks`, until all have changed their imports."""

from procs.forked_ranks import Ranks, Slot

__all__ = ["Ranks", "Slot"]
