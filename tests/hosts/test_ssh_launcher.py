"""`dure run --hosts` over real ssh: hosts that compute together, that cannot take part, and deaths.

Hosts are network namespaces. What needs no second host is in `launch.procs.test_hosts_here`.
"""

import os
import signal

import psutil
import pytest

from tests.launch.procs.ssh_hosts import front, number_of, ssh_hosts
from tests.waiting import PATIENCE_S, key_file, until

pytestmark = pytest.mark.needs("sshd", "ClusterShell")

SUM = """
import os, torch, dure
with dure.process_group():
    ones = torch.ones(3)
    dure.all_reduce(ones)
    print(os.environ["GREETING"], ones.tolist(), dure.get_world_size(), flush=True)
"""
TELL = "import os; print(*(os.environ.get(n) for n in ('GREETING', 'RANK', 'WORLD_SIZE')))"
WAIT = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"
SILENT = "import socket, time; s = socket.create_server(('', 2223)); time.sleep(1000)"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh"), name="ssh") as made:
        made[0][1].start([f"-c{SILENT}"], {})
        yield made


@pytest.fixture
def start(two_hosts, tmp_path):
    """Return what starts a program from host a; whatever is left of it ends with the test."""
    made, config = two_hosts
    started = []

    def start(nodes, program, *flags, **variables):
        path = tmp_path / "program.py"
        path.write_text(program)
        words = [*flags, "--no-zygote", path]
        started.append(front(made[0], config, nodes, words, **variables))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.kill(number_of(process), signal.SIGKILL)
        process.wait()


def left_on(made) -> list[str]:
    """Return the processes on hosts but those that this module has started there."""
    lines = [line for host in made for line in host.inside()]
    return [line for line in lines if "sshd" not in line and "2223" not in line]


def _lines(process, count):
    return [process.stdout.readline().strip() for _ in range(count)]


def _command_lines(word: str) -> list[str]:
    """Return the command lines in which `word` stands."""
    running = psutil.process_iter(["cmdline"])
    lines = [" ".join(process.info["cmdline"] or ()) for process in running]
    return [line for line in lines if word in line]


def test_ranks_on_two_hosts_compute_together_with_the_users_slots_and_variables(start):
    job = start("b:2,a:1", SUM, "-x", "GREETING", "--no-fold", GREETING="a b'c")
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, err
    lines = [f"[{who}] a b'c [3.0, 3.0, 3.0] 3" for who in ("a:2", "b:0", "b:1")]
    assert sorted(out.splitlines()) == lines


@pytest.mark.parametrize(("rank", "code"), [(1, 7), (0, 255), (1, 255)])  # 255 is ssh's own
def test_exit_code_is_that_of_the_first_host_that_failed(rank, code, start, two_hosts):
    program = f"import os, signal; os._exit({code}) if os.environ['RANK'] == '{rank}' else None"
    job = start("a,b", f"{program}\nsignal.pause()", "--nproc", "1")
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == code, err
    assert f"rank {rank} on {'ab'[rank]}" in err
    assert "cannot be reached" not in err
    assert left_on(two_hosts[0]) == []


def test_ctrl_c_ends_all_hosts(start, tmp_path):
    job = start("a,b", WAIT, "--nproc", "1")
    _lines(job, 2)
    os.kill(number_of(job), signal.SIGINT)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130
    assert _command_lines(str(tmp_path)) == []


def test_death_of_the_front_ends_all_hosts_and_no_secret_is_seen(start, tmp_path):
    secret = b"0123456789abcdef" * 2
    key = key_file(tmp_path / "key", secret)
    job = start("a,b", WAIT, "--nproc", "1", "--key-file", key, "-xSECRET_TOKEN=hunter2")
    _lines(job, 2)
    seen = _command_lines(secret.hex()) + _command_lines("hunter2")
    assert [words for words in seen if "--ssh-option" not in words] == [], "of the user's own line"
    os.kill(number_of(job), signal.SIGKILL)
    until(lambda: not _command_lines(str(tmp_path)), "all to end")


def test_lines_of_a_dry_run_run(start, two_hosts, tmp_path):
    key = key_file(tmp_path / "key")
    flags = ("--nproc", "1", f"-xDURE_JOB_KEY_FILE={key}", "-xGREETING=hello", "--dry-run")
    shown, err = start("a,b", TELL, *flags).communicate(timeout=PATIENCE_S)
    lines = [line for line in shown.splitlines() if not line.startswith("#")]
    assert len(lines) == 2, err
    script = " & ".join(lines) + " & wait"
    job = two_hosts[0][0].start_any(["sh", "-c", script], {})
    out, err = job.communicate(timeout=PATIENCE_S)
    said = [line.partition("hello ")[2] for line in out.splitlines() if "hello" in line]
    assert sorted(said) == ["0 2", "1 2"], err


def test_a_host_without_the_interpreter_is_named(start):
    job = start("b", WAIT, "--nproc", "1", "--remote-python", "/nowhere/python")
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 127
    assert "host b cannot start /nowhere/python" in err


LOST = "host b cannot be reached, or was lost: "


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("-oHostName=10.1.1.1", "Network is unreachable"),
        ("-oPort=2222", "Connection refused"),
        ("-oUser=nobody", "Permission denied"),
        ("-oUserKnownHostsFile=/dev/null", "Host key verification failed"),
        pytest.param("-oHostName=10.213.7.77", "No route to host", marks=SLOW),
        pytest.param("-oPort=2223", "Connection timed out during banner exchange", marks=SLOW),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_reason(option, why, start, two_hosts):
    job = start("a,b", WAIT, "--nproc", "1", f"--ssh-option={option}")
    _, err = job.communicate(timeout=PATIENCE_S)
    lines = [line for line in err.splitlines() if LOST in line]
    assert (job.returncode, len(lines)) == (255, 1), err
    assert why in lines[0]
    assert left_on(two_hosts[0]) == []


DEATHS = {
    "dure run on b": (1, ("--node-rank 1",), 255, LOST + "ssh ended without a word, as when"),
    "sshd on b": (1, ("sshd: root@notty",), 255, LOST + "Connection to 10.213.7.2 closed"),
    "ssh": (0, ("ssh -F", "-- b "), 137, "ssh to host b was killed by SIGKILL"),
    "dure run on a": (0, ("--node-rank 0", "--leash"), 137, "`dure run` on host a was killed by"),
}


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    "who",
    [
        *("dure run on b", "ssh"),
        *(pytest.param(who, marks=SLOW) for who in ("sshd on b", "dure run on a")),
    ],
)
def test_a_killed_process_is_named_and_nothing_of_the_job_remains(who, jobs, tmp_path):
    host, words, code, named = DEATHS[who]
    shared = set(os.listdir("/dev/shm"))
    job = jobs.start_reducing("ssh", lease_s=4)
    job.kill(host, *words)
    assert job.codes() == [code], job.printed()
    assert named in job.printed()
    jobs.check_nothing_left()
    until(lambda: not left_on(job.hosts), lambda: f"the end of {left_on(job.hosts)}")
    assert list(tmp_path.glob("**/dure_*")) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "dure" in name} == set()


@SLOW
def test_a_front_that_is_cut_off_from_its_hosts_names_one_and_all_end_where_sshd_asks(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "ssh"
    program.write_text(WAIT)
    folder.mkdir()
    with ssh_hosts(3, folder, "ClientAliveInterval 5") as (made, config):
        process = front(made[0], config, "b,c", ["--nproc", "1", "--no-zygote", program])
        _lines(process, 2)
        made[0].cut()
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 255, said
        assert "host b cannot be reached" in said or "host c cannot be reached" in said, said
        until(lambda: not left_on(made), lambda: f"the end of {left_on(made)}")
