"""Creation of hybrid groups: all ranks agree whether the group exists."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.creation import agree_on_completion
from dure.errors import RendezvousTimeout
from dure.store import HashStore


@pytest.mark.parametrize("late", [(1,), (1, 2), (2, 1)])
def test_ranks_that_are_ready_after_the_others_gave_up_raise_as_they_do(late):
    """All name the ranks that were late when the first one gave up."""
    store, ranks = HashStore(), (0, *late)
    for rank in ranks:
        options = BackendOptions(
            store=store,
            rank=rank,
            size=len(ranks),
            global_ranks=tuple(sorted(ranks)),
            timeout=timedelta(milliseconds=1),
            name="group",
        )
        with pytest.raises(RendezvousTimeout) as info:
            agree_on_completion(options)
        assert info.value.missing == tuple(sorted(late))
        assert ("this rank was late" in str(info.value)) == (rank in late)
