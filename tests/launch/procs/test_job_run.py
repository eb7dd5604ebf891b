"""`dure run`: what a rank finds, what the user sees, and the exit code."""

import json
import subprocess
import sys

from dure.launch.ranks.cores import num_cores
from dure.store.system import cpu_quota
from tests.launch.procs.launching import Launching

SHOW = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
                      "cwd": os.getcwd()}))
"""
FIND = """
    import json, multiprocessing, os, socket, sys
    from dure.store.key import load_for
    def key():
        return load_for("127.0.0.1").raw.hex()
    if __name__ == "__main__":
        if os.environ["RANK"] == "0":
            server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        host, port = os.environ["DURE_STORE_ADDR"].split(":")
        socket.create_connection((host, int(port))).close()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            keys = [key(), pool.apply(key)]
        sight = repr(os.environ) + open("/proc/self/cmdline").read()
        sight += open(f"/proc/{os.getppid()}/cmdline").read()
        print(json.dumps(dict(env=dict(os.environ), keys=keys, stdin=sys.stdin.read(),
                              seen=keys[0] in sight)))
"""


def test_ranks_find_torchruns_environment_and_dures_key_store_and_input(job: Launching) -> None:
    process = job.start("--nproc", "2", job.write(FIND), stdin=subprocess.PIPE)
    done = job.finish(process, stdin="typed\n")
    assert done.code == 0, done.err
    told = [json.loads(done.lines(rank)[0]) for rank in (0, 1)]
    (key,) = {key for rank in told for key in rank["keys"]}
    assert len(key) == 64
    assert [(rank["seen"], rank["stdin"]) for rank in told] == [(False, "typed\n"), (False, "")]
    one, other = (rank["env"] for rank in told)  # see test_environment_of_torchrun.py
    cores = min(num_cores(), cpu_quota())
    assert one["OMP_NUM_THREADS"] == str(max(1, int(cores / 2)))
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "DURE_LAUNCHER", "DURE_STORE_ADDR"):
        assert one[name] == other[name]


STEPS = """
import os, resource, torch, dure
import torch.distributed as dist

# 30 MB, taken and given back five times: some 38,000 pages, or none. If a small block is between
# the free ones since, one tensor or two (768 pages each) find a new place, once.
def steps():
    for _ in range(5):
        sum(int(t[-1]) for t in [torch.ones(3 << 18) for _ in range(10)])

steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print("kept" if faults < 5000 else f"given back: {faults} faults")
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(total.item(), os.environ["OMP_NUM_THREADS"])
dist.destroy_process_group()
dure.init_process_group("gloo")
print(dure.get_world_size())
"""


def test_stock_program_runs_whatever_is_set_and_keeps_the_memory_that_a_step_frees(
    job: Launching,
) -> None:
    settings = {"DURE_INSECURE": "1", "DURE_STORE_BIND": "127.0.0.2", "OMP_NUM_THREADS": "7"}
    done = job.run("-n", "2", job.write(STEPS), env=settings)  # for hosts without a launcher
    assert done.lines(0) == done.lines(1) == ["kept", "3.0 7", "2"], done.err


def test_program_sees_what_python_shows_it(job: Launching) -> None:
    job.write("", "pkg/__init__.py")
    for name in ("sub dir/prog.py", "pkg/tool.py", "pkg/__main__.py"):
        job.write(SHOW, name)
    programs = [
        ("sub dir/prog.py", "--nproc", "9", "-m", "x y"),
        ("-m", "pkg.tool", "-x"),
        ("-m", "pkg"),
    ]
    ours = [job.start(*(() if words[0] == "-m" else ("--",)), *words) for words in programs]
    pythons = [job.start_any(sys.executable, *words) for words in programs]
    finished = job.finish_all(*ours, *pythons)
    seen = [json.loads(run.lines(0)[0]) for run in finished[:3]]
    assert seen == [json.loads(run.out) for run in finished[3:]]


def test_module_with_missing_import_shows_its_own_error(job: Launching) -> None:
    job.write("", "pkg/__init__.py")
    job.write("def f():\n    import no_such_module_at_all\nf()\n", "pkg/tool.py")
    done = job.run("-m", "pkg.tool")
    assert done.code == 1
    assert "no_such_module_at_all" in done.err
    assert "runpy" not in done.err


def test_any_program_runs_without_python(job: Launching) -> None:
    script = """
        echo "$RANK of $WORLD_SIZE"
        [ "$RANK" = 0 ] && exec touch said
        until [ -e said ]; do sleep 0.01; done
        exit 3
    """
    done = job.run("-n", "2", "--no-python", "sh", "-c", script)
    assert (done.code, done.lines(0), done.lines(1)) == (3, ["0 of 2"], ["1 of 2"])
