"""On other systems, pretended: what needs no Linux works, and all else says by name that it does.

A process takes away what only Linux has, and the extensions, before it imports Dure. What it cannot
show is what another system has otherwise; the release workflow tries that.
"""

import subprocess
import sys

from tests.waiting import PATIENCE_S

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


PROGRAM = """
import importlib, pkgutil
import dure.layout, dure.plan, dure.schedules
import dure
from dure import rpc
from dure.cli import app
from dure.torch_names import listed
from dure.testing import run_ranks

def summed(*rank):
    x = torch.ones(2)
    dure.all_reduce(x)
    return x.tolist()

print(run_ranks(2, summed))
dure.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}/meeting")
print(dure.get_backend(), summed())
for refused in (
    lambda: dure.new_group([0], backend="shm"),
    lambda: rpc.init_rpc("worker0", rank=0, world_size=1),
    lambda: rpc.share(torch.ones(2)),
    lambda: dure.spawn(summed),
):
    try:
        print("not refused:", refused())
    except dure.UsageError as error:
        print(error.what)
dure.destroy_process_group()
for command in ("run", "doctor", "demo", "bench"):
    print(command, app.run_command_line([command]))
for found in pkgutil.walk_packages(dure.__path__, "dure.", onerror=lambda name: None):
    here = found.name.removeprefix("dure.")  # modules of torch that are listed say so anywhere
    if not found.name.endswith((".__main__", "._engine", "._hits")) and not listed(here):
        try:
            importlib.import_module(found.name)
        except dure.UsageError as error:
            print(found.name, error.what)
print("all")
"""


def test_what_needs_no_linux_works_and_the_rest_raises_by_name(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRETENDED + PROGRAM, tmp_path],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[[2.0, 2.0], [2.0, 2.0]]", "gloo [1.0, 1.0]"]
    by_name = ["the backend 'shm' ", "dure.rpc ", "dure.rpc.share ", "dure.launch "]
    pairs = zip(lines[2:6], by_name, strict=True)
    assert [line for line, name in pairs if not line.startswith(name)] == []
    assert lines[6:10] == ["run 2", "doctor 2", "demo 2", "bench 2"]
    assert lines[-1] == "all"
    modules, reasons = zip(*(line.split(" ", 1) for line in lines[10:-1]), strict=True)
    assert "dure.launch" in modules
    assert all(name.startswith(("dure.cli.", "dure.launch", "dure.run")) for name in modules), (
        modules
    )
    assert all(reason.startswith("dure.launch ") for reason in reasons), reasons
