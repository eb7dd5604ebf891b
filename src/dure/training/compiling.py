"""Wrappers and `torch.compile`: the module is compiled, and cut at the ends of buckets.

The code around the module (locks, hooks, collectives) is no material for graphs. Functions marked
`untraced` (comm/untraced.py) are run as they are, whether the user compiled the module inside or
the wrapper.

A module that is compiled in one piece hands over all its gradients at the end of backward, when
there is nothing left to overlap their reduction with. torch's compiler therefore cuts a graph into
pieces of about a bucket each, if it knows that DDP is active: it asks torch's own class which
module is active. `cut_graphs` answers for ours.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dure.comm.untraced import COMPILER, untraced

__all__ = ["Cutting", "cut_graphs"]

_FIRST_PIECE_BYTES = 1 << 20


class Cutting:
    """What the compiler asks the active DDP module for: how much goes into a piece."""

    __slots__ = ("bucket_bytes_cap",)

    def __init__(self, cap_bytes: int) -> None:
        # The compiler's first piece has 1 MiB, and it wants the others to be no smaller.
        self.bucket_bytes_cap = max(cap_bytes, _FIRST_PIECE_BYTES)


@untraced
def cut_graphs(cutting: Any) -> Any:
    """Set how the compiler cuts graphs from now on; return the previous setting.

    Any: an instance of torch's class, or a `Cutting`.
    """
    if COMPILER not in sys.modules:
        return None
    theirs: Any = torch.nn.parallel.DistributedDataParallel
    before, theirs._active_ddp_module = theirs._active_ddp_module, cutting
    return before
