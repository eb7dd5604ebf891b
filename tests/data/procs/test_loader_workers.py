"""A DataLoader with workers: what was read ahead does not count, and augmentation is the same."""

from typing import Any

import pytest

from dure.testing.pool import start_server
from tests.data.loaders import Grouped, Noisy, check_resumed, loader_of, noise_of, taken


def workers(count: int, **options: Any) -> dict[str, Any]:
    """Return the options of a loader whose workers are forked from the server, not from here."""
    return {"num_workers": count, "multiprocessing_context": start_server()} | options


@pytest.mark.parametrize("kind", [Noisy, Grouped])
def test_loader_resumed_with_other_workers_delivers_what_the_undisturbed_one_does(kind):
    check_resumed(kind, workers(2, prefetch_factor=4, persistent_workers=True), workers(1))


def test_loader_counts_what_was_delivered_and_not_what_was_read_ahead():
    loader = loader_of(Noisy(60), **workers(1, prefetch_factor=8))
    taken(loader, 0, 2)
    assert loader.state_dict()["sampler"]["consumed"] == 2 * 3 * 2
    assert loader.sampler.state_dict()["consumed"] > 2 * 3 * 2
    assert len(loader) == 10


def test_sample_is_augmented_by_workers_as_without_them():
    alone = noise_of(ranks=1, batch_size=12)
    assert noise_of(ranks=1, batch_size=2, **workers(2)) == alone
