"""`ProcessGroup`: a set of ranks that communicate.

`core` is membership, and how an operation is run; `operations` is what the ranks can do, and has
the fast path.
"""

from __future__ import annotations

from dure.comm.group.core import GroupSpec, started
from dure.comm.group.operations import ProcessGroup

__all__ = ["GroupSpec", "ProcessGroup", "started"]
