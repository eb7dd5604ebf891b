"""Tracing: hooks around every operation, and the flight recorder.

* `events`: hooks that are called at the start and the end of every operation; test recorders and
  fault injection use them.
* `record`, `ring`, `flight`, `files`: the last operations of every rank. They are always recorded,
  and written to a file after an error, on SIGUSR2 (`signals`), or by `dump()`.
* `spans`, `marks`: the phases of training steps, and values that the program reports for a step;
  recorded on request (`record_steps`). `publishing`: writes all of these for the page of a run.
* `merging`, `findings`, `waiting`, `timeline`, `pipeline_steps`: read and compare the files of all
  ranks (`dure trace merge`, and the page).
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
