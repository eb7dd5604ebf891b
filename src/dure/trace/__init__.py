"""What ranks did, and when: events for whoever listens, and the flight recorder.

* `events`: the one seam at which a recorder of communication or fault injection attaches.
* `record`, `ring`, `flight`, `files`: the last operations of every rank, always kept, and written
  down on an error, on SIGUSR2 (`signals`), or by `dump()`.
* `spans`, `marks`: what a training step is made of, and what the program says of it, recorded on
  request (`record_steps`); `publishing`: all of it once a second, for the page of a run.
* `merging`, `findings`, `waiting`, `timeline`, `pipeline_steps`: the files of all ranks side by
  side (`dure trace merge`, and the page).
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
