"""Creation of hybrid groups: all ranks agree whether the group exists."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.creation import agree_on_completion
from dure.errors import RendezvousTimeout
from dure.store import HashStore


def test_a_rank_that_is_ready_after_the_others_gave_up_raises_as_they_do():
    store = HashStore()
    early, late = (
        BackendOptions(
            store=store,
            rank=rank,
            size=2,
            global_ranks=(0, 1),
            timeout=timedelta(milliseconds=1),
            name="pair",
        )
        for rank in (0, 1)
    )
    for options in (early, late):
        with pytest.raises(RendezvousTimeout) as info:
            agree_on_completion(options)
        assert info.value.missing == (1,)
