"""Training that outlives the death of ranks, without starting the survivors anew.

`run` calls a training function in a group that is made anew when ranks are lost or come; `State` is
what must not be lost, committed step by step; `on_preempt` and `preempted` save before the end.

Below them: `roster` (which members and which step come next: pure), `council` (how ranks agree on
it), `registry` (what they write for that, and who has ended), `forming` (the store in which a group
is made), `keeper` (where the store is, when its holder dies), `snapshot` (copies of the state).
"""

from __future__ import annotations

from dure.elastic.options import Options
from dure.elastic.preempt import on_preempt, preempted
from dure.elastic.running import run
from dure.elastic.state import Recovery, State

__all__ = ["Options", "Recovery", "State", "on_preempt", "preempted", "run"]
