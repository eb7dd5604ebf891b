"""Detection, on environments as systems set them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dure.placement import CLUSTER_VARIABLES, Member, NodeSlot, System, derived_port, detect
from unit.placement import environments as seen


def member(rank, world_size, local=None, here=None, node=None):
    return Member(
        rank=rank, world_size=world_size, local_rank=local, local_world_size=here, node=node
    )


CASES = {
    "nothing": ({}, System.NOBODY, None, None, None),
    "srun": (
        seen.SLURM_STEP,
        System.SLURM,
        member(5, 7, 1, 3, 1),
        NodeSlot(nnodes=2, node_rank=1, copies=3),
        "cn08",
    ),
    "srun, a launcher on each host": (
        seen.SLURM_AGENT,
        System.SLURM,
        member(1, 2, 0, 1, 1),
        NodeSlot(nnodes=2, node_rank=1, nproc=8),
        "cn08",
    ),
    "sbatch": (seen.SLURM_BATCH, System.SLURM, None, None, None),
    "srun --pty": (seen.SLURM_STEP | {"SLURM_PTY_PORT": "4"}, System.SLURM, None, None, None),
    "salloc's step": (
        seen.SLURM_STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"},
        System.SLURM,
        None,
        None,
        None,
    ),
    "Open MPI 4": (
        seen.OPEN_MPI_4,
        System.OPEN_MPI,
        member(1, 2, 1, 2),
        NodeSlot(nnodes=1, node_rank=0, copies=2),
        None,
    ),
    "Open MPI 5": (
        seen.OPEN_MPI_5,
        System.OPEN_MPI,
        member(1, 2, 1, 2),
        NodeSlot(nnodes=1, node_rank=0, copies=2),
        None,
    ),
    "MPICH": (
        seen.MPICH,
        System.HYDRA,
        member(1, 2, 1, 2),
        NodeSlot(nnodes=1, node_rank=0, copies=2),
        None,
    ),
    "Intel MPI": (
        seen.INTEL_MPI,
        System.HYDRA,
        member(1, 2, 1, 2),
        NodeSlot(nnodes=1, node_rank=0, copies=2),
        None,
    ),
    "torchrun": (seen.TORCHRUN, System.TORCHRUN, member(3, 4, 1, 2, 1), None, "node1"),
    "dure run": (
        seen.TORCHRUN | {"DURE_LAUNCHER": "abc"},
        System.DURE,
        member(3, 4, 1, 2, 1),
        None,
        "node1",
    ),
    "by hand": ({"RANK": "0", "WORLD_SIZE": "1"}, System.PLAIN, member(0, 1), None, None),
    "PAI": (
        seen.PAI,
        System.PAI,
        member(2, 3, 0, 1, 2),
        NodeSlot(nnodes=3, node_rank=2, nproc=8),
        "dlc18isgeayd0000-master-0",
    ),
    "an old PyTorchJob": (
        seen.PYTORCHJOB_OLD,
        System.PYTORCHJOB,
        member(2, 3, 0, 1, 2),
        NodeSlot(nnodes=3, node_rank=2),
        "mnist-master-0",
    ),
    "a PyTorchJob": (
        seen.PYTORCHJOB,
        System.PYTORCHJOB,
        member(2, 3, 0, 1, 2),
        NodeSlot(nnodes=3, node_rank=2, nproc=4),
        "mnist-master-0",
    ),
    "an indexed job": (
        seen.INDEXED_JOB,
        System.KUBERNETES,
        member(1, 4, 0, 1, 1),
        NodeSlot(nnodes=4, node_rank=1),
        "train-0.train",
    ),
    "a JobSet": (
        seen.JOBSET,
        System.KUBERNETES,
        member(3, 4, 0, 1, 3),
        NodeSlot(nnodes=4, node_rank=3),
        "llm-workers-0-0.llm",
    ),
    "SkyPilot": (
        seen.SKYPILOT,
        System.SKYPILOT,
        member(1, 2, 0, 1, 1),
        NodeSlot(nnodes=2, node_rank=1, nproc=8),
        "10.0.0.4",
    ),
    "SkyPilot, no GPUs": (
        seen.SKYPILOT_CPU,
        System.SKYPILOT,
        member(1, 2, 0, 1, 1),
        NodeSlot(nnodes=2, node_rank=1),
        "10.0.0.4",
    ),
    "SkyPilot on Slurm": (
        seen.SKYPILOT_ON_SLURM,
        System.SKYPILOT,
        member(1, 2, 0, 1, 1),
        NodeSlot(nnodes=2, node_rank=1, nproc=8),
        "10.0.0.4",
    ),
    "an elastic PyTorchJob": (
        seen.PYTORCHJOB_ELASTIC,
        System.PYTORCHJOB,
        member(2, 3, 0, 1, 2),
        NodeSlot(nnodes=3, node_rank=2, nproc=4),
        "mnist-master-0",
    ),
    "Kubeflow's TrainJob": (
        seen.KUBEFLOW_TRAINER,
        System.KUBERNETES,
        member(1, 3, 0, 1, 1),
        NodeSlot(nnodes=3, node_rank=1),
        "bert-node-0-0.bert",
    ),
    "Volcano": (
        seen.VOLCANO,
        System.PYTORCHJOB,
        member(2, 3, 0, 1, 2),
        NodeSlot(nnodes=3, node_rank=2),
        "mnist-master-0.mnist",
    ),
    "accelerate launch": (seen.ACCELERATE, System.TORCHRUN, member(3, 4, 1, 2, 1), None, "node1"),
    "torchx": (seen.TORCHX, System.TORCHRUN, member(3, 4, 1, 2, 1), None, "node1"),
    "deepspeed": (seen.DEEPSPEED, System.LAUNCHER, member(3, 4, 1, 2, 1), None, "node1"),
    "Azure, PyTorch": (
        seen.AZURE_PYTORCH,
        System.LAUNCHER,
        member(3, 4, 1, None, 1),
        None,
        "10.0.0.4",
    ),
    "Azure, MPI": (
        seen.AZURE_MPI,
        System.OPEN_MPI,
        member(3, 4, 1, 2),
        NodeSlot(nnodes=2, node_rank=1, copies=2),
        "10.0.0.4",
    ),
    "SageMaker": (
        seen.SAGEMAKER,
        System.SAGEMAKER,
        member(1, 2, 0, 1, 1),
        NodeSlot(nnodes=2, node_rank=1, nproc=8),
        "algo-1",
    ),
    "SageMaker's torchrun": (
        seen.SAGEMAKER | seen.TORCHRUN,
        System.TORCHRUN,
        member(3, 4, 1, 2, 1),
        None,
        "node1",
    ),
    "Ray Train": (seen.RAY_TRAIN, System.LAUNCHER, member(3, 4, 1, 2, 1), None, "10.0.0.4"),
    "a child of Lightning's": (seen.LIGHTNING_CHILD, System.NOBODY, None, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_environment_means(name):
    environ, system, rank, slot, host = CASES[name]
    found = detect(environ)
    assert (found.system, found.member, found.slot, found.host) == (system, rank, slot, host)


# Two systems at once: the environment, the one that counts, and its rank.
CONFLICTS = {
    "mpirun inside Slurm": (
        seen.SLURM_AGENT | seen.OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "0"},
        System.OPEN_MPI,
        0,
    ),
    "mpiexec inside Slurm": (
        seen.SLURM_AGENT | seen.MPICH | {"PMI_RANK": "0"},
        System.HYDRA,
        0,
    ),
    "srun --mpi=pmi2": (
        seen.SLURM_STEP | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "4"},
        System.SLURM,
        5,
    ),
    "torchrun inside Slurm": (seen.SLURM_AGENT | seen.TORCHRUN, System.TORCHRUN, 3),
    "torchrun inside a pod": (seen.PYTORCHJOB | seen.TORCHRUN, System.TORCHRUN, 3),
    "RANK in srun's shell": (seen.SLURM_STEP | {"RANK": "5", "WORLD_SIZE": "7"}, System.PLAIN, 5),
    "mpirun inside SkyPilot": (seen.SKYPILOT | seen.OPEN_MPI_4, System.OPEN_MPI, 1),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_systems_the_nearest_counts(name):
    environ, system, rank = CONFLICTS[name]
    found = detect(environ)
    assert found.system is system
    assert found.member is not None
    assert found.member.rank == rank


def test_two_systems_that_disagree_are_noted():
    assert any("Slurm" in note for note in detect(seen.SLURM_AGENT | seen.TORCHRUN).notes)
    agreeing = seen.SLURM_STEP | {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1"}
    assert detect(agreeing).notes == ()


def test_world_size_without_a_hint_stays_unclear():
    found = detect({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found.unclear
    assert found.slot is None
    assert found.notes
    assert not detect(seen.TORCHRUN).unclear
    assert not detect(seen.PAI).unclear


def test_derived_endpoint_is_the_same_on_all_ranks_and_differs_between_steps():
    ranks = [seen.SLURM_STEP | {"SLURM_PROCID": str(r)} for r in range(7)]
    assert len({detect(r).endpoint for r in ranks}) == 1
    found = detect(seen.SLURM_STEP)
    assert found.port_derived
    assert found.endpoint == f"cn08:{derived_port('slurm 476.0')}"
    other = detect(seen.SLURM_STEP | {"SLURM_STEP_ID": "1"})
    assert other.job != found.job


def test_told_address_goes_before_the_derived_one():
    found = detect(seen.SLURM_STEP | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29501"})
    assert (found.endpoint, found.port_derived) == ("[fd00::1]:29501", False)
    found = detect(seen.SLURM_STEP | {"MASTER_ADDR": "elsewhere"})
    assert (found.host, found.port_derived) == ("elsewhere", True)


def test_first_pod_of_an_old_operator_is_called_by_its_service():
    master = seen.PYTORCHJOB_OLD | {
        "HOSTNAME": "mnist-master-0",
        "MASTER_ADDR": "localhost",
        "RANK": "0",
    }
    assert detect(master).endpoint == detect(seen.PYTORCHJOB_OLD).endpoint == "mnist-master-0:23456"


def test_requeued_job_is_another_job():
    assert detect(seen.SLURM_STEP | {"SLURM_RESTART_COUNT": "1"}).job != detect(seen.SLURM_STEP).job


def test_every_value_has_its_source():
    for environ, *_ in CASES.values():
        found = detect(environ)
        kept = [reason.what for reason in found.reasons]
        if found.member is not None and found.member.local_rank is not None and found.slot is None:
            assert "rank" in kept
        assert not found.endpoint or "endpoint" in kept
        assert all(reason.source for reason in found.reasons)


def test_malformed_number_is_passed_over_with_a_note():
    found = detect(seen.SLURM_STEP | {"SLURM_PROCID": "five"})
    assert found.member is None
    assert any("SLURM_PROCID" in note for note in found.notes)


class Watched(dict):
    """An environment that knows what it was asked for."""

    asked: set[str] = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def test_every_variable_that_is_read_is_described():
    for environ in [case[0] for case in (*CASES.values(), *CONFLICTS.values())]:
        detect(Watched(environ))
    assert set(CLUSTER_VARIABLES) >= Watched.asked
    assert len(Watched.asked) > 40


NOTED = {"PAI", "an old PyTorchJob", "a PyTorchJob", "an elastic PyTorchJob", "Volcano"}
"""The trap of WORLD_SIZE is told."""


def test_what_systems_really_set_makes_no_other_note():
    silent = {"sbatch", "salloc's step", "srun --pty", "a child of Lightning's"}
    noted = {name for name, case in CASES.items() if detect(case[0]).notes} - silent
    assert noted == NOTED


def test_rank_is_missing_where_lightning_started_the_process():
    assert any("Lightning" in note for note in detect(seen.LIGHTNING_CHILD).notes)


@pytest.mark.parametrize("hosts", ["[", "[" * 100_000, '["a", 1]', '{"algo-2": 1}', "algo-2", "[]"])
def test_list_of_hosts_that_is_none_is_passed_over(hosts):
    assert detect(seen.SAGEMAKER | {"SM_HOSTS": hosts}).system is System.NOBODY


def test_number_of_a_special_step_is_a_number():
    """Every batch script has one, and nothing is wrong with it."""
    for step in ("4294967290", "4294967291"):
        notes = detect(seen.SLURM_STEP | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}).notes
        assert not [note for note in notes if "STEP" in note]


NAMES = sorted(CLUSTER_VARIABLES)
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", "a-master-0", "n[1-3]", "1(x3)", "n[", "4294967291", "1.2.3.4", "x-1"]),
    st.text(max_size=8),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_detection_never_fails_and_numbers_stay_in_bounds(environ):
    found = detect(environ)
    if found.member is not None:
        assert 0 <= found.member.rank < found.member.world_size
    if found.slot is not None:
        assert found.slot.node_rank >= 0
    assert (found.system is System.NOBODY) <= (found.member is None)


@given(st.text())
def test_derived_port_is_neither_well_known_nor_ephemeral(job):
    assert 15_000 <= derived_port(job) <= 29_000
