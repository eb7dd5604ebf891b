"""What stands before each line of output: who wrote it.

`[3] ` is rank 3, `[0-2,5] ` are four ranks that wrote the same line, `[node7:3] ` is rank 3 on the
host node7. A single rank's prefix is padded to one width, so that lines stand in columns.
"""

from __future__ import annotations

from dure.launch.show.folding import rank_set

__all__ = ["Prefixes"]

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_MANY = 1  # bold


class Prefixes:
    """The prefixes of this host's ranks.

    Args:
        first_rank: The rank of this host's local rank 0.
        world_size: How many ranks the job has, for the width.
        host: The host's name, where it is to be shown.
        shown: Whether there are prefixes at all.
    """

    def __init__(
        self, first_rank: int, world_size: int, host: str | None = None, shown: bool = True
    ) -> None:
        self._first = first_rank
        self._width = len(str(world_size - 1))
        self._host = "" if host is None else f"{host.partition('.')[0]}:"
        self._shown = shown
        self._known: dict[tuple[int, bool], bytes] = {}

    def of(self, ranks: int, colour: bool) -> bytes:
        """Return the prefix of a set of local ranks, where bit i stands for local rank i."""
        known = self._known.get((ranks, colour))
        if known is None:
            if len(self._known) > 4096:  # sets are many: 2 to the power of ranks
                self._known.clear()
            known = self._known[ranks, colour] = self._make(ranks, colour).encode()
        return known

    def _make(self, bits: int, colour: bool) -> str:
        if not self._shown:
            return ""
        ranks = [self._first + i for i in range(bits.bit_length()) if bits >> i & 1]
        single = len(ranks) == 1
        who = f"{ranks[0]:>{self._width}}" if single else rank_set(ranks)
        text = f"[{self._host}{who}] "
        if not colour:
            return text
        code = _COLOURS[ranks[0] % len(_COLOURS)] if single else _MANY
        return f"\x1b[{code}m{text}\x1b[0m"
