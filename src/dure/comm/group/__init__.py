"""`ProcessGroup`: a set of ranks that communicate.

`spec` is what a group is to be; `core` is membership, and how an operation is run; `operations` is
what the ranks can do, and has the fast path.
"""

from __future__ import annotations

from dure.comm.group.core import started
from dure.comm.group.operations import ProcessGroup
from dure.comm.group.spec import GroupSpec

__all__ = ["GroupSpec", "ProcessGroup", "started"]
