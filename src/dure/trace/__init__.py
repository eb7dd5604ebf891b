"""What ranks did, and when: events for whoever listens, and the flight recorder.

* `events`: the one seam at which a recorder of communication or fault injection attaches.
* `record`, `ring`, `flight`, `files`: the last operations of every rank, always kept, and written
  down on an error, on SIGUSR2 (`signals`), or by `dump()`.
* `spans`: what a training step is made of, recorded on request (`record_steps`).
* `merging`, `findings`, `timeline`: the files of all ranks side by side (`dure trace merge`).
"""

from dure.trace.events import (
    Event,
    Hook,
    Ring,
    State,
    add_hook,
    begin,
    end,
    hooks,
    remove_hook,
    span,
)
from dure.trace.flight import dump, record_steps, recorded
from dure.trace.record import Record
from dure.trace.spans import Span

__all__ = [
    "Event",
    "Hook",
    "Record",
    "Ring",
    "Span",
    "State",
    "add_hook",
    "begin",
    "dump",
    "end",
    "hooks",
    "record_steps",
    "recorded",
    "remove_hook",
    "span",
]
