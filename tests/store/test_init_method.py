"""Where ranks meet: by a URL, by variables, and in a cluster that they found themselves in."""

import os

import pytest

from dure.errors import RendezvousError, StoreError
from dure.store.init_method import LocalEndpoint, TcpEndpoint, read_init_method
from tests.placement import environments as seen


@pytest.fixture
def inside(monkeypatch):
    """Return what puts this process into an environment."""

    def enter(environ):
        for name in list(os.environ):
            if name.startswith(("SLURM", "OMPI", "PMI", "MASTER", "DURE", "TORCHELASTIC")):
                monkeypatch.delenv(name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return enter


def test_ranks_of_one_host_meet_at_a_socket(inside):
    inside(seen.OPEN_MPI_4)
    method = read_init_method(None, -1, -1)
    assert (method.rank, method.world_size) == (1, 2)
    assert isinstance(method.endpoint, LocalEndpoint)
    assert "718340097" in method.endpoint.name


def test_ranks_of_several_hosts_meet_after_a_derived_port(inside):
    inside(seen.SLURM_STEP)
    method = read_init_method("env://", -1, -1)
    assert (method.rank, method.world_size) == (5, 7)
    assert isinstance(method.endpoint, TcpEndpoint)
    assert (method.endpoint.host, method.endpoint.other) == ("cn08", "cn09")
    assert 15000 < method.endpoint.port <= 29000
    assert method.endpoint.job == method.endpoint.name != ""
    inside(seen.SLURM_STEP | {"DURE_STORE_PORT": "4711"})
    assert getattr(read_init_method("env://", -1, -1).endpoint, "port", 0) == 4711


def test_told_address_is_taken_as_it_is(inside):
    inside(seen.SLURM_STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    endpoint = read_init_method(None, -1, -1).endpoint
    assert isinstance(endpoint, TcpEndpoint)
    assert (endpoint.host, endpoint.port) == ("10.0.0.1", 29500)


def test_the_launchers_store_may_have_an_ipv6_address(inside):
    inside({"RANK": "1", "WORLD_SIZE": "2", "DURE_STORE_ADDR": "[fe80::1]:29500"})
    endpoint = read_init_method(None, -1, -1).endpoint
    assert isinstance(endpoint, TcpEndpoint)
    assert (endpoint.host, endpoint.port) == ("fe80::1", 29500)


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        (seen.SLURM_STEP, 4, 7),
        (seen.SLURM_STEP | {"WORLD_SIZE": "2"}, -1, -1),
        (seen.MPICH | {"MPI_LOCALNRANKS": "1"}, -1, -1),
    ],
)
def test_contradictions_and_unknown_hosts_are_errors(inside, environ, rank, size):
    inside(environ)
    with pytest.raises(RendezvousError):
        read_init_method(None, rank, size)


def test_arguments_go_before_the_url(inside):
    inside({})
    method = read_init_method("tcp://h:1?rank=1&world_size=2", 0, 3)
    assert (method.rank, method.world_size) == (0, 3)
    method = read_init_method("tcp://h:1?rank=1&world_size=2", -1, -1)
    assert (method.rank, method.world_size) == (1, 2)


@pytest.mark.parametrize("local", [2, 1])
def test_under_torchrun_ranks_meet_beside_the_agent(inside, local):
    told = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "h"}
    told |= {"MASTER_PORT": 29500, "TORCHELASTIC_USE_AGENT_STORE": True}
    inside({name: str(value) for name, value in told.items()})
    endpoint = read_init_method(None, -1, -1).endpoint
    assert isinstance(endpoint, LocalEndpoint if local == 2 else TcpEndpoint)
    assert getattr(endpoint, "port", 29501) == 29501


@pytest.mark.parametrize(
    "bad",
    [
        "udp://127.0.0.1:1?rank=0&world_size=1",
        "tcp://127.0.0.1?rank=0&world_size=1",
        "tcp://:29500?rank=0&world_size=1",
        "tcp://127.0.0.1:port?rank=0&world_size=1",
        "tcp://127.0.0.1:29500",
        "tcp://127.0.0.1:29500?rank=zero&world_size=1",
        "file://relative/path?rank=0&world_size=1",
        "file://?rank=0&world_size=1",
        "nonsense",
    ],
)
def test_a_malformed_url_is_an_error(bad: str):
    with pytest.raises(RendezvousError):
        read_init_method(bad, -1, -1)


PLAIN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_all_missing_variables_are_named_together(inside):
    inside({})
    with pytest.raises(RendezvousError) as caught:
        read_init_method(None, -1, -1)
    assert all(name in caught.value.what for name in PLAIN)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "first"), ("WORLD_SIZE", "2.0"), ("MASTER_PORT", "http"), ("MASTER_PORT", "0")],
)
def test_a_variable_that_is_no_number_is_named(inside, name, value):
    inside(PLAIN | {name: value})
    with pytest.raises(RendezvousError) as caught:
        read_init_method(None, -1, -1)
    assert name in caught.value.what


def test_an_unknown_host_is_named(inside):
    inside(PLAIN | {"MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(StoreError) as caught:
        read_init_method(None, -1, -1).endpoint.open(1, 2, 1.0)
    assert "MASTER_ADDR" in caught.value.what
    assert "no-such-host.invalid" in caught.value.seen
