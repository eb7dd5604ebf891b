"""`dure run`: what a rank finds, what the user sees, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.launch.ranks.cores import read_topology
from dure.launch.ranks.limits import cpu_quota
from procs.launching import DURE, Launching
from procs.launching import launching as _launching

SHOW = """
    import json, os, sys
    print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0],
                      "file": __file__, "name": __name__, "cwd": os.getcwd()}))
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    yield from _launching(tmp_path)


def test_environment_of_two_ranks_is_torchruns(job: Launching) -> None:
    done = job.run("--nproc", "2", job.write(SHOW))
    assert done.code == 0, done.err
    ranks = [json.loads(done.lines(rank)[0])["env"] for rank in (0, 1)]
    for rank, env in enumerate(ranks):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert env[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "2"
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(env["MASTER_PORT"]) < 65536
        assert env["TORCHELASTIC_RESTART_COUNT"] == env["TORCHELASTIC_MAX_RESTARTS"] == "0"
        cores = min(read_topology(frozenset(os.sched_getaffinity(0))).num_cores, cpu_quota())
        assert env["OMP_NUM_THREADS"] == str(max(1, int(cores / 2)))
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "DURE_LAUNCHER", "DURE_STORE_ADDR"):
        assert ranks[0][name] == ranks[1][name]


def test_settings_for_hosts_without_a_launcher_do_no_harm(job: Launching) -> None:
    script = job.write("import dure; dure.init_process_group('gloo'); print(dure.get_world_size())")
    settings = {"DURE_INSECURE": "1", "DURE_STORE_BIND": "127.0.0.2"}
    done = job.run("-n", "2", script, env=settings)
    assert (done.code, done.lines(0), done.lines(1)) == (0, ["2"], ["2"]), done.err


def test_threads_chosen_by_the_user_stay(job: Launching) -> None:
    done = job.run("-n", "2", job.write(SHOW), env={"OMP_NUM_THREADS": "7"})
    assert json.loads(done.lines(0)[0])["env"]["OMP_NUM_THREADS"] == "7"


STEPS = """
import os, resource, torch

def steps():  # 30 MB, taken and given back five times: some 38,000 pages, or none
    for _ in range(5):
        sum(int(t[-1]) for t in [torch.ones(3 << 18) for _ in range(10)])

steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000)
print(os.environ.get("MALLOC_TRIM_THRESHOLD_"), os.environ.get("MALLOC_MMAP_THRESHOLD_"))
"""


def test_ranks_keep_the_memory_that_a_step_frees(job: Launching) -> None:
    done = job.run("-n", "2", job.write(STEPS))
    assert done.lines(0) == done.lines(1) == ["True", "67108864 33554432"], done.err


def test_ranks_have_the_c_librarys_own_thresholds_where_asked_for(job: Launching) -> None:
    done = job.run("-n", "2", "--malloc-defaults", job.write(STEPS))
    assert done.lines(0)[1] == done.lines(1)[1] == "None None", done.err


def test_script_sees_what_python_shows_it(job: Launching) -> None:
    script = job.write(SHOW, "sub dir/prog.py")
    mine = json.loads(job.run("-n", "1", "--", script, "--nproc", "9", "-m", "x y").lines(0)[0])
    output = subprocess.check_output(
        [sys.executable, script, "--nproc", "9", "-m", "x y"], cwd=job.directory
    )
    plain = json.loads(output)
    for field in ("argv", "path", "file", "name", "cwd"):
        assert mine[field] == plain[field]


@pytest.mark.parametrize("module", ["pkg.tool", "pkg"])
def test_module_sees_what_python_shows_it(job: Launching, module: str) -> None:
    job.write("", "pkg/__init__.py")
    job.write(SHOW, "pkg/tool.py")
    job.write(SHOW, "pkg/__main__.py")
    mine = json.loads(job.run("-n", "1", "-m", module, "--flag").lines(0)[0])
    plain = json.loads(
        subprocess.check_output([sys.executable, "-m", module, "--flag"], cwd=job.directory)
    )
    for field in ("argv", "path", "file", "name", "cwd"):
        assert mine[field] == plain[field]


def test_any_program_runs_without_python(job: Launching) -> None:
    done = job.run("-n", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"; exit 3')
    assert done.code == 3
    assert done.lines(0) == ["0 of 2"] or done.lines(1) == ["1 of 2"]


def test_master_port_is_free_for_rank_0_and_store_is_reachable(job: Launching) -> None:
    done = job.run(
        "-n",
        "2",
        job.write("""
            import os, socket
            if os.environ["RANK"] == "0":
                server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
                print("bound")
            host, port = os.environ["DURE_STORE_ADDR"].split(":")
            socket.create_connection((host, int(port)), timeout=5).close()
            print("reached")
        """),
    )
    assert done.code == 0, done.err
    assert done.lines(0) == ["bound", "reached"]


def test_job_key_is_shared_and_not_in_sight(job: Launching) -> None:
    program = job.write("""
        import multiprocessing, os
        from dure.store.key import load_for
        def show():
            print(load_for("127.0.0.1").raw.hex(), flush=True)
        if __name__ == "__main__":
            show()
            child = multiprocessing.get_context("spawn").Process(target=show)
            child.start(); child.join()
            sight = repr(os.environ) + open("/proc/self/cmdline").read()
            sight += open(f"/proc/{os.getppid()}/cmdline").read()
            print(load_for("127.0.0.1").raw.hex() in sight)
    """)
    done = job.run("-n", "2", program)
    assert done.code == 0, done.err
    keys = {line for rank in (0, 1) for line in done.lines(rank)[:2]}
    assert len(keys) == 1
    assert len(keys.pop()) == 64
    assert done.lines(0)[2] == done.lines(1)[2] == "False"


def test_stock_torch_distributed_program_runs(job: Launching) -> None:
    program = job.write("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
    """)
    done = job.run("-n", "2", program)
    assert done.code == 0, done.err
    assert done.lines(0) == done.lines(1) == ["3.0"]


def test_only_rank_0_reads_standard_input(job: Launching) -> None:
    program = job.write("import sys; print(repr(sys.stdin.read()))")
    process = job.start("-n", "2", program, stdin=subprocess.PIPE)
    done = job.finish(process, stdin="typed\n")
    assert done.lines(0) == ["'typed\\n'"]
    assert done.lines(1) == ["''"]


def test_log_dir_keeps_each_ranks_output(job: Launching) -> None:
    program = job.write("import os, sys; print(os.environ['RANK']); print('e', file=sys.stderr)")
    job.run("-n", "2", "--log-dir", "logs", program)
    for rank in (0, 1):
        directory = job.directory / "logs" / "attempt_0" / f"rank_{rank}"
        assert (directory / "stdout.log").read_text() == f"{rank}\n"
        assert (directory / "stderr.log").read_text() == "e\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("-n", "2", "missing.py"),
        ("-n", "2", "."),
        ("-n", "0", "prog.py"),
        ("-n", "-1", "prog.py"),
        ("-n", "2", "-m", "no_such_module_at_all"),
        ("-n", "2", "-m", "json.no_such_part"),
        ("-n", "2", "-m", "json"),
        ("-n", "2", "-m", "a..b"),
        ("-n", "2", "--no-python", "no-such-program-at-all"),
        ("-m", "--no-python", "x"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(job: Launching, arguments: tuple[str, ...]) -> None:
    job.write("print('ran')")
    done = job.run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err


@pytest.mark.parametrize("arguments", [("-n", "two", "prog.py"), ("--nprok", "2", "prog.py"), ()])
def test_bad_options_are_code_2_without_traceback(
    job: Launching, arguments: tuple[str, ...]
) -> None:
    done = job.run(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [("--help",), ("env",), ("version",), ("run", "--help")])
def test_other_commands_load_no_torch(arguments: tuple[str, ...]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments!r}; from dure.cli.app import run_command_line\n"
    code += (
        "code = run_command_line(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_launcher_loads_no_torch() -> None:
    code = "import sys, dure.launch, dure.cli.run.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0


def test_python_m_is_the_command() -> None:
    assert b"run" in subprocess.check_output([*DURE, "--help"], timeout=30)
