"""Detection, on environments as systems set them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.placement import System, derived_port, detect, set_here
from tests.placement import environments as seen

# An environment (`environments.NAME`), who set it, the rank that it makes of a program (rank, world
# size, local rank, local world size, node), the slot that it makes of `dure run` (hosts, node rank,
# ranks to start, processes on this host), and the host of rank 0.
CASES = {
    "NOTHING": ("NONE", None, None, None),
    "SLURM_STEP": ("SLURM", (5, 7, 1, 3, 1), (2, 1, None, 3), "cn08"),
    "SLURM_AGENT": ("SLURM", (1, 2, 0, 1, 1), (2, 1, 8, 1), "cn08"),
    "SLURM_BATCH": ("SLURM", None, None, None),
    "SLURM_TERMINAL": ("SLURM", None, None, None),
    "SALLOC": ("SLURM", None, None, None),
    "OPEN_MPI_4": ("OPEN_MPI", (1, 2, 1, 2, None), (1, 0, None, 2), None),
    "MPICH": ("HYDRA", (1, 2, 1, 2, None), (1, 0, None, 2), None),
    "TORCHRUN": ("TORCHRUN", (3, 4, 1, 2, 1), None, "node1"),
    "DURE_RUN": ("DURE", (3, 4, 1, 2, 1), None, "node1"),
    "PAI": ("PLAIN", (2, 3, None, None, None), None, "dlc18isgeayd0000-master-0"),
    "BY_HAND": ("PLAIN", (0, 1, None, None, None), None, None),
    "PYTORCHJOB_OLD": ("PYTORCHJOB", (2, 3, 0, 1, 2), (3, 2, None, 1), "mnist-master-0"),
    "PYTORCHJOB": ("PYTORCHJOB", (2, 3, 0, 1, 2), (3, 2, 4, 1), "mnist-master-0"),
    "PYTORCHJOB_ELASTIC": ("PYTORCHJOB", (2, 3, 0, 1, 2), (3, 2, 4, 1), "mnist-master-0"),
    "VOLCANO": ("PYTORCHJOB", (2, 3, 0, 1, 2), (3, 2, None, 1), "mnist-master-0.mnist"),
    "INDEXED_JOB": ("KUBERNETES", (1, 4, 0, 1, 1), (4, 1, None, 1), "train-0.train"),
    "JOBSET": ("KUBERNETES", (3, 4, 0, 1, 3), (4, 3, None, 1), "llm-workers-0-0.llm"),
    "KUBEFLOW_TRAINER": ("KUBERNETES", (1, 3, 0, 1, 1), (3, 1, None, 1), "bert-node-0-0.bert"),
    "DEEPSPEED": ("LAUNCHER", (3, 4, 1, 2, 1), None, "node1"),
    "AZURE_PYTORCH": ("LAUNCHER", (3, 4, 1, None, 1), None, "10.0.0.4"),
    "LIGHTNING_CHILD": ("NONE", None, None, None),
}
ENVIRONMENTS = {name: getattr(seen, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_environment_means(name):
    found = detect(ENVIRONMENTS[name])
    rank = found.member and dataclasses.astuple(found.member)
    slot = found.slot and dataclasses.astuple(found.slot)
    assert (found.system.name, rank, slot, found.host) == CASES[name]


# Two systems at once: the environment, the one that counts, and its rank.
CONFLICTS = {
    "mpirun inside Slurm": (seen.SLURM_AGENT | seen.OPEN_MPI_4, "OPEN_MPI", 1),
    "mpiexec inside Slurm": (
        seen.SLURM_AGENT | seen.MPICH | {"PMI_RANK": "0"},
        "HYDRA",
        0,
    ),
    "srun --mpi=pmi2": (seen.SLURM_STEP | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "SLURM", 5),
    "torchrun inside Slurm": (seen.SLURM_AGENT | seen.TORCHRUN, "TORCHRUN", 3),
    "torchrun inside a pod": (seen.PYTORCHJOB | seen.TORCHRUN, "TORCHRUN", 3),
    "RANK in srun's shell": (
        seen.SLURM_STEP | {"RANK": "5", "WORLD_SIZE": "7"},
        "PLAIN",
        5,
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_systems_the_nearest_counts(name):
    environ, system, rank = CONFLICTS[name]
    found = detect(environ)
    assert (found.system.name, found.member.rank) == (system, rank)


def test_world_size_without_a_hint_stays_unclear():
    found = detect({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found.unclear
    assert found.slot is None
    assert found.notes
    assert not detect(seen.TORCHRUN).unclear
    assert detect(seen.PAI).unclear  # it counts hosts there, but no variable says so


def test_derived_endpoint_is_the_same_on_all_ranks_and_differs_between_steps():
    ranks = [seen.SLURM_STEP | {"SLURM_PROCID": str(r)} for r in range(7)]
    assert len({detect(r).endpoint for r in ranks}) == 1
    found = detect(seen.SLURM_STEP)
    assert found.port_derived
    assert found.endpoint == f"cn08:{derived_port('slurm 476.0')}"
    for other in ({"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}):
        assert detect(seen.SLURM_STEP | other).job != found.job


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


def test_what_systems_really_set_makes_no_note_but_of_the_trap_of_world_size():
    silent = {"SLURM_BATCH", "SALLOC", "SLURM_TERMINAL", "LIGHTNING_CHILD"}
    noted = {name for name, environ in ENVIRONMENTS.items() if detect(environ).notes} - silent
    assert noted == {"PAI", "PYTORCHJOB_OLD", "PYTORCHJOB", "PYTORCHJOB_ELASTIC", "VOLCANO"}
    assert any("Lightning" in note for note in detect(seen.LIGHTNING_CHILD).notes)


def test_malformed_number_is_passed_over_with_a_note():
    found = detect(seen.SLURM_STEP | {"SLURM_PROCID": "five"})
    assert found.member is None
    assert any("SLURM_PROCID" in note for note in found.notes)


class Watched(dict[str, str]):
    """An environment that records what it was asked for."""

    asked: set[str] = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def test_every_variable_that_is_read_is_shown_by_dure_env():
    for environ in seen.ALL:
        detect(Watched(environ))
    assert set(set_here(dict.fromkeys(Watched.asked, "x"))) == Watched.asked
    assert len(Watched.asked) > 40


NAMES = sorted({name for environ in seen.ALL for name in environ})
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", "a-master-0", "n[1-3]", "1(x3)", "n[", "4294967291", "1.2.3.4", "x-1"]),
    st.text(max_size=8),
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_detection_never_fails_and_numbers_stay_in_bounds(environ):
    found = detect(environ)
    if found.member is not None:
        assert 0 <= found.member.rank < found.member.world_size
    if found.slot is not None:
        assert found.slot.node_rank >= 0
    assert (found.system is System.NONE) <= (found.member is None)
