"""Training that outlives the death of ranks, without a restart of the survivors.

`run` calls a training function in a new group whenever ranks are lost or come; `State` is
the state that must not be lost, committed step by step; `on_preempt` and `preempted` save before
the end.

Below them: `views` (which members and which step come next: pure), `membership` (how ranks agree on
it in the job's store), `snapshot` (copies of the state).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.elastic.preempt import on_preempt, preempted
from dure.elastic.running import Options, run
from dure.elastic.snapshot import Snapshot
from dure.elastic.state import Recovery, State
from dure.elastic.views import Progress
from dure.torch_names import lazy_names

__all__ = [
    "Options",
    "Progress",
    "Recovery",
    "Snapshot",
    "State",
    "on_preempt",
    "preempted",
    "run",
]

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.elastic import multiprocessing as multiprocessing, utils as utils
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)
