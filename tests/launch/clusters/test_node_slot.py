"""Taking a host's slot from what a cluster says."""

import pytest

from dure.errors import UsageError
from dure.launch.clusters.node_slot import take_node_slot
from dure.placement import detect
from tests.placement import environments as seen


def taken(environ, **chosen):
    return dict(take_node_slot(detect(environ), chosen).values)


def test_one_launcher_a_host_takes_everything_from_slurm():
    values = taken(seen.SLURM_AGENT)
    assert values == {
        "nproc": 8,
        "nnodes": (2, 2),
        "backend": "static",
        "node_rank": 1,
        "run_id": "slurm 476.0",
        "endpoint": detect(seen.SLURM_AGENT).endpoint,
    }
    assert "Slurm" in take_node_slot(detect(seen.SLURM_AGENT), {}).line


def test_flags_go_before_the_cluster():
    values = taken(seen.SLURM_AGENT, nproc=2, endpoint="a:1", run_id="mine")
    assert set(values) == {"nnodes", "backend", "node_rank"}
    assert values["node_rank"] == 1
    values = taken(seen.SLURM_AGENT, nnodes=(1, 2))  # from so many to so many: not numbered
    assert set(values) == {"nproc", "endpoint", "run_id"}


@pytest.mark.parametrize("flag", ["standalone", "hosts", "hostfile"])
def test_own_hosts_need_no_slot(flag):
    assert taken(seen.SLURM_STEP, **{flag: True}) == {}
    assert taken({"RANK": "1", "WORLD_SIZE": "2"}, **{flag: True}) == {}


@pytest.mark.parametrize("environ", [{}, seen.TORCHRUN, {"WORLD_SIZE": "2"}])
def test_without_a_slot_no_values_are_taken(environ):
    assert taken(environ) == {}
    assert take_node_slot(detect(environ), {}).line == ""


@pytest.mark.parametrize("environ", [seen.SLURM_BATCH, seen.SALLOC])
def test_shell_of_a_slurm_job_names_srun(environ):
    found = detect(environ)
    line = take_node_slot(found, {"nproc": 8}).line
    assert f"one of the {len(found.hosts)} hosts" in line
    assert "`srun --ntasks-per-node=1 dure run ...`" in line
    for chosen in ("standalone", "hosts", "nnodes"):
        assert take_node_slot(found, {chosen: True}).line == ""


@pytest.mark.parametrize("environ", [seen.SLURM_STEP, seen.OPEN_MPI_4, seen.MPICH])
def test_launcher_once_a_rank_is_refused(environ):
    with pytest.raises(UsageError) as caught:
        taken(environ)
    assert "standalone" in caught.value.fix


def test_world_size_that_may_count_hosts_is_refused_until_said():
    unclear = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UsageError):
        taken(unclear)
    assert taken(unclear, nnodes=(2, 2), node_rank=1) == {}


def test_hosts_without_an_address_are_refused():
    environ = {k: v for k, v in seen.INDEXED_JOB.items() if k != "MASTER_ADDR"}
    with pytest.raises(UsageError):
        taken(environ)
    assert taken(environ, endpoint="a:1")["node_rank"] == 1
