"""Lines between leaders: what is left of one that cannot be opened."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import zmq

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.lines import open_line
from dure.errors import StoreTimeout
from dure.store import HashStore


def test_line_that_cannot_be_opened_leaves_nothing_to_wait_for():
    context = zmq.Context()
    options = BackendOptions(
        store=HashStore(),
        rank=1,
        size=2,
        global_ranks=(0, 1),
        timeout=timedelta(milliseconds=1),
        name="alone",
    )
    with pytest.raises(StoreTimeout) as caught:  # its traceback holds all that the call had
        open_line(context, (1, 0), "127.0.0.1", options)
    end = threading.Thread(target=context.term, daemon=True)
    end.start()
    end.join(5)
    assert not end.is_alive(), caught
