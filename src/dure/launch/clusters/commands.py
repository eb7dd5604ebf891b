"""What the ssh launcher sends to each host: pure functions from a job to words and lines.

A remote host gets two things. The command of ssh holds what every user may see:

    exec /bin/sh -c 'read variables until an empty line; cd DIR; exec PYTHON -m dure.cli run ..'

and ssh's standard input the rest, first the variables of `-x`, one per line, then an empty line,
then the key. So neither a key nor a variable's value is ever in a list of processes, in the
environment of ssh or in a file. The shell reads its lines byte by byte and leaves the key to
`dure run --key-stdin`; after the key it is the *control stream*: signals come on it, and its end
ends the agent (see `dure.launch.clusters.control_stream`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from dure.errors import UsageError
from dure.launch.clusters.control_stream import end_s
from dure.launch.clusters.hosts import Slots
from dure.launch.clusters.meeting import is_this_host
from dure.launch.supervisor import Timing

__all__ = ["HostsJob", "agent_words", "first_lines", "host_command", "shown_command"]

_READ = 'while IFS= read -r __dure && [ -n "$__dure" ]; do export "$__dure"; done'
"""The loop's own variable has a name that no user's `-x` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsJob:
    """A job for several hosts, as the ssh launcher sees it.

    Attributes:
        hosts: The hosts, and the number of ranks of each.
        program: The program and its arguments.
        flags: The user's own flags that every host's `dure run` gets as they are.
        run_id: The job's name.
        endpoint: host:port of its store.
        directory: Where the program runs on every host.
        python: The interpreter there.
        options: The interpreter's own, such as -O.
        exports: Variables for the ranks, by name.
        ssh_options: Words for ssh, before the host.
        backend: How the hosts rendezvous.
        grace_s: How long ranks have to end (`JobSpec.grace_s`).
    """

    hosts: tuple[Slots, ...]
    program: tuple[str, ...]
    flags: tuple[str, ...] = ()
    run_id: str
    endpoint: str
    directory: str
    python: str
    options: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict[str, str])
    ssh_options: tuple[str, ...] = ()
    backend: str = "static"
    grace_s: float | None = None

    @property
    def end_s(self) -> float:
        """How long agents have to end when they are asked to."""
        return end_s(self.grace_s)

    @property
    def follow_s(self) -> float:
        """How long agents have to end by themselves after the first failure."""
        return end_s(Timing().grace_s if self.grace_s is None else self.grace_s)


def agent_words(job: HostsJob, number: int, *, held: bool = True) -> tuple[str, ...]:
    """Return the command line of host `number`'s agent, from the interpreter on.

    If `held`, its standard input is the control stream; else it is started by hand.
    """
    nproc = job.hosts[number].nproc
    words = [job.python, *job.options, "-m", "dure.cli", "run", *job.flags]
    words += ["--nproc", str(nproc)] if nproc is not None else []
    words += ["--nnodes", str(len(job.hosts)), "--rdzv-id", job.run_id]
    if len(job.hosts) > 1:
        words += ["--rdzv-backend", job.backend, "--rdzv-endpoint", job.endpoint]
        words += ["--node-rank", str(number)] if job.backend == "static" else []
    words += ["--key-stdin", "--leash"] if held else []
    return (*words, "--", *job.program)


def shown_command(job: HostsJob, number: int) -> str:
    """Return a line for a shell that starts host `number`'s agent by hand."""
    exports = "".join(f"{name}={shlex.quote(value)} " for name, value in job.exports.items())
    words = shlex.join(agent_words(job, number, held=False))
    command = f"cd {shlex.quote(job.directory)} && {exports}{words}"
    if is_this_host(job.hosts[number].host):
        return command
    return shlex.join(["ssh", *job.ssh_options, job.hosts[number].host, command])


def host_command(job: HostsJob, number: int) -> str:
    """Return what host `number`'s shell runs, whichever shell it is."""
    go = f"cd {shlex.quote(job.directory)} && exec {shlex.join(agent_words(job, number))}"
    return f"exec /bin/sh -c {shlex.quote(f'{_READ}; {go}')}"


def first_lines(job: HostsJob, key: bytes) -> bytes:
    """Return what goes first on the standard input of every host's shell.

    Raises:
        UsageError: A variable's value has a line break, which no line can hold.
    """
    for name, value in job.exports.items():
        if "\n" in value:
            raise UsageError("-x cannot pass on a value of several lines", seen=name)
    lines = [f"{name}={value}" for name, value in job.exports.items()]
    text = "".join(f"{line}\n" for line in lines)
    return text.encode("utf-8", "surrogateescape") + b"\n" + key.hex().encode() + b"\n"
