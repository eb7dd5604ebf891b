"""`dure run --hosts` over real ssh, between two hosts that are network namespaces.

What needs no second host is in `test_hosts_here`, hosts and processes that fail in
`hosts.test_ssh_launcher_faults`.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.launch.procs.ssh_hosts import front, number_of, ssh_hosts
from tests.waiting import PATIENCE_S, key_file, until

pytestmark = pytest.mark.needs("sshd")

SUM = """
import os, torch, dure
with dure.process_group():
    ones = torch.ones(3)
    dure.all_reduce(ones)
    print(os.environ["GREETING"], ones.tolist(), dure.get_world_size(), flush=True)
"""
TELL = "import os; print(*(os.environ.get(n) for n in ('GREETING', 'RANK', 'WORLD_SIZE')))"
FAIL = "import os, signal; os._exit(7) if os.environ['RANK'] == '2' else signal.pause()"
WAIT = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh")) as made:
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


def test_exit_code_is_that_of_the_first_host_that_failed(start):
    job = start("a,b", FAIL, "--nproc", "2")
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 7, err
    assert "rank 2 on" in err


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
