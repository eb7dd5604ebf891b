"""The ledger: what all ranks must know of a backward, sent along with the last bucket.

    | used (one number a parameter) | trouble |

It is reduced by the collective of the last bucket, which is never started before backward has
ended, when a rank knows all there is to tell:

* `used` is 1 for each parameter that this rank has a gradient of. After the reduction it is 0 where
  no rank has one: such a parameter keeps its gradient as it was.
* `trouble` is 1 if anything went wrong here. After the reduction it is 0 unless some rank is in
  trouble; otherwise all ranks know it, say to each other what happened (verdicts.py), and raise the
  same error at the same step.

With a communication hook it travels alone, when the hook's results are there (hooking.py).

Zero is zero in every format and whatever the sum is divided by; no other value is asked for but in
`all_used`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dure.parallel.ddp.slots import Slot

__all__ = ["Ledger"]


class Ledger:
    """The end of the last bucket's flat tensor."""

    __slots__ = ("_most", "_size", "flags")

    def __init__(self, flat: torch.Tensor, num_parameters: int, num_ranks: int) -> None:
        self.flags = flat[flat.numel() - num_parameters - 1 :]
        self._size = num_parameters
        self._most = 1 - 0.5 / num_ranks

    @staticmethod
    def size(num_parameters: int) -> int:
        """Return how many elements a ledger has."""
        return num_parameters + 1

    def write(self, unused: Iterable[Slot], trouble: bool) -> None:
        """Enter this rank's part."""
        self.flags.fill_(1)
        for slot in unused:
            self.flags[slot.number] = 0
        if not trouble:
            self.flags[self._size] = 0

    def add_trouble(self) -> None:
        """Enter that something went wrong here after all."""
        self.flags[self._size] = 1

    def write_nothing(self) -> None:
        """Enter that this rank used nothing and lacks nothing."""
        self.flags.zero_()

    def all_used(self) -> bool:
        """Tell, of averaged flags, whether every rank used everything."""
        used = self.flags[: self._size]
        used = torch.view_as_real(used)[:, 0] if used.is_complex() else used
        return bool(used.min() > self._most)

    def used(self) -> list[bool]:
        """Tell of each parameter whether any rank used it."""
        return (self.flags[: self._size] != 0).tolist()

    def trouble(self) -> bool:
        """Tell whether any rank is in trouble."""
        return bool(self.flags[self._size] != 0)
