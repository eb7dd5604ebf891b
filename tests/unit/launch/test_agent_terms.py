"""Who takes part in a job: agents of one version, who were told the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

import dure
from dure.errors import UsageError
from dure.launch import JobSpec
from dure.launch.agent.journal import entry_key
from dure.launch.agent.link import Linked
from dure.store.address import resolve
from dure.store.key import mint
from dure.store.ladder import Ladder
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer

KEY = mint()
TERMS = "dure/agents/terms"
SAME = {
    "version": dure.__version__,
    "nnodes": (2, 2),
    "max_restarts": 0,
    "elastic": False,
    "min_ranks": 1,
    "quorum": True,
    "run_id": "job",
}


@contextmanager
def job_with(terms: bytes) -> Iterator[tuple[JobSpec, NetworkStore]]:
    """A job whose first agent has left these terms; yield what a second one is told."""
    server = StoreServer(listen(resolve("127.0.0.1", 0)), KEY)
    address = f"127.0.0.1:{server.port}"
    ladder = Ladder([address], KEY, own=address)
    try:
        ladder.lead().set(TERMS, terms)
        yield JobSpec(program="p.py", nnodes=(2, 2), endpoint=address, serves=False), ladder.current
    finally:
        ladder.close()
        server.stop()


def refusal(terms: bytes) -> tuple[UsageError, bool]:
    """Return why an agent takes no part, and whether it has told the others."""
    with job_with(terms) as (spec, store):
        with pytest.raises(UsageError) as caught:
            Linked(spec, KEY)
        return caught.value, store.check([entry_key(0)])


def test_who_was_told_the_same_takes_part() -> None:
    with job_with(msgspec.msgpack.encode(SAME)) as (spec, _):
        link = Linked(spec, KEY)
        assert link.run_id == "job"
        link.close()


@pytest.mark.parametrize("changed", [{"max_restarts": 1}, {"nnodes": (1, 2)}, {"quorum": False}])
def test_who_was_told_other_things_is_refused_and_the_others_hear_of_it(
    changed: dict[str, object],
) -> None:
    error, told = refusal(msgspec.msgpack.encode(SAME | changed))
    assert next(iter(changed)) in (error.seen or "")
    assert told


@pytest.mark.parametrize(
    "terms",
    [
        msgspec.msgpack.encode(SAME | {"version": "9.8.7"}),
        msgspec.msgpack.encode({"version": "9.8.7", "tasks": 3}),
        msgspec.msgpack.encode({"nnodes": (2, 2), "max_restarts": 0}),
        msgspec.msgpack.encode([1, 2]),
        b"\xc1",
        b"\x81\xa7version\xa1\xff",
    ],
)
def test_another_version_is_refused_by_name_and_left_alone(terms: bytes) -> None:
    error, told = refusal(terms)
    assert dure.__version__ in (error.seen or "")
    assert ("9.8.7" in (error.seen or "")) == (b"9.8.7" in terms)
    assert not told
