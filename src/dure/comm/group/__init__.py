"""`ProcessGroup`: a set of ranks that communicate.

`spec` has the arguments from which a group is made; `core` has membership, and how an operation is
run; `operations` has the operations and their fast path.
"""

from __future__ import annotations

from dure.comm.group.core import started
from dure.comm.group.operations import ProcessGroup
from dure.comm.group.spec import GroupSpec

__all__ = ["GroupSpec", "ProcessGroup", "started"]
