"""Creation of hybrid groups: all ranks agree whether the group exists."""

import pytest

from dure.comm.backends.hybrid.creation import agree_on_completion
from dure.errors import RendezvousTimeout
from dure.store import HashStore
from tests.comm.options import options


@pytest.mark.parametrize("late", [(1,), (1, 2), (2, 1)])
def test_ranks_that_are_ready_after_the_others_gave_up_raise_as_they_do(late):
    """All name the ranks that were late when the first one gave up."""
    store, ranks = HashStore(), (0, *late)
    for rank in ranks:
        with pytest.raises(RendezvousTimeout) as info:
            agree_on_completion(options(rank, len(ranks), store, timeout_s=0.001))
        assert info.value.missing == tuple(sorted(late))
        assert ("this rank was late" in str(info.value)) == (rank in late)
