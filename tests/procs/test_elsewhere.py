"""On other systems, pretended: what needs no Linux works, and all else says by name that it does.

A process takes away what only Linux has, and the extensions, before it imports Dure. What it cannot
show is what another system has otherwise; the release workflow tries that.
"""

import subprocess
import sys

PRETENDED = """
import fcntl, os, select, signal, socket, sys, sysconfig, time
import psutil, torch, zmq  # these are built for one system, and may ask which

sysconfig.get_config_vars()  # and Python's own are kept

LINUX_ALONE = {
    os: "O_PATH MFD_CLOEXEC P_PIDFD eventfd memfd_create pidfd_open pipe2 "
        "posix_fallocate sched_getaffinity sched_setaffinity waitid",
    signal: "SIGRTMAX SIGRTMIN pidfd_send_signal",
    socket: "SO_PEERCRED MSG_CMSG_CLOEXEC",
    select: "epoll EPOLLIN",
    time: "CLOCK_BOOTTIME",
    fcntl: "F_GETPIPE_SZ F_SETPIPE_SZ",
}
for module, names in LINUX_ALONE.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.platform = "darwin"


class NoExtension:
    def find_spec(self, name, path=None, target=None):
        if name in {"dure.native._engine", "dure.tensor._hits"}:
            raise ImportError(f"{name} was not built")


sys.meta_path.insert(0, NoExtension())
"""


def said(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRETENDED + program],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_imports_or_raises_a_typed_error_by_name():
    lines = said("""
import importlib, pkgutil
import dure.layout, dure.plan, dure.schedules

for found in pkgutil.walk_packages(dure.__path__, "dure.", onerror=lambda name: None):
    if not found.name.endswith((".__main__", "._engine", "._hits")):
        try:
            importlib.import_module(found.name)
        except dure.UsageError as error:
            print(found.name, error.what)
print("all")
""")
    assert lines[-1] == "all"
    refused = [line.split()[0] for line in lines[:-1]]
    assert "dure.launch" in refused
    assert all(name.startswith(("dure.cli.", "dure.launch")) for name in refused), refused
    assert all("dure.launch" in line.partition(" ")[2] for line in lines[:-1]), lines


def test_ranks_as_threads_and_gloo_work_and_the_rest_is_refused(tmp_path):
    lines = said(f"""
import dure
from dure import rpc
from dure.cli import app
from dure.testing import run_ranks

def summed(*rank):
    x = torch.ones(2)
    dure.all_reduce(x)
    return x.tolist()

print(run_ranks(2, summed))
dure.init_process_group(rank=0, world_size=1, init_method="file://{tmp_path}/meeting")
print(dure.get_backend(), summed())
for refused in (
    lambda: dure.new_group([0], backend="shm"),
    lambda: rpc.init_rpc("worker0", rank=0, world_size=1),
    lambda: rpc.share(torch.ones(2)),
    lambda: dure.spawn(summed),
):
    try:
        refused()
    except dure.UsageError as error:
        print(error.what)
dure.destroy_process_group()
print(app.run_command_line(["plan", "pipeline", "--schedule", "1f1b", "--stages", "4"]) and "bad")
for command in ("run", "doctor", "demo", "bench"):
    print(command, app.run_command_line([command]))
""")
    told = "\n".join(lines)
    assert lines[0] == "[[2.0, 2.0], [2.0, 2.0]]"
    assert lines[1] == "gloo [1.0, 1.0]"
    by_name = ["the backend 'shm'", "dure.rpc ", "dure.rpc.share ", "dure.launch "]
    assert [line for line, name in zip(lines[2:6], by_name, strict=True) if name not in line] == []
    assert lines[-4:] == ["run 2", "doctor 2", "demo 2", "bench 2"], told
