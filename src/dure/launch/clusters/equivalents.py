"""The same job in other launchers' words: what `--dry-run` prints, to be copied and pasted.

Pure functions. Each line starts the program on as many ranks and hosts as `dure run` would. Those
of mpirun, and of srun where all hosts get equally many ranks, start the program itself, which finds
its rank there. The others start one launcher a host.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from dure.launch.clusters.commands import Fleet
from dure.placement import contract_hosts

__all__ = ["Section", "equivalent_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One launcher's lines; `note` says what one must know."""

    launcher: str
    lines: tuple[str, ...]
    note: str = ""


def equivalent_lines(fleet: Fleet, rank_words: tuple[str, ...]) -> tuple[Section, ...]:
    """Return the lines of each launcher.

    Args:
        fleet: The job; every host's number of ranks is set.
        rank_words: What starts one rank by itself: the interpreter, the program, its arguments.
    """
    sections = (
        Section(launcher="srun", lines=_srun(fleet, rank_words), note="inside a Slurm allocation"),
        Section(launcher="mpirun (Open MPI)", lines=(_open_mpi(fleet, rank_words),)),
        Section(launcher="mpiexec (MPICH, Intel MPI)", lines=(_hydra(fleet, rank_words),)),
        Section(
            launcher="clush",
            lines=(_clush(fleet),),
            note="all hosts at once; needs the same key file on all of them",
        ),
        Section(launcher="ssh", lines=tuple(_ssh(fleet)), note="all of them at the same time"),
        Section(
            launcher="torchrun",
            lines=tuple(_torchrun(fleet, rank_words)),
            note="line n on host n; no encryption, no key",
        ),
    )
    local = _names(fleet) == ["localhost"]
    return tuple(s for s in sections if not (local and s.launcher in ("clush", "ssh")))


def _counts(fleet: Fleet) -> list[int]:
    return [slots.nproc or 1 for slots in fleet.hosts]


def _names(fleet: Fleet) -> list[str]:
    return [slots.host for slots in fleet.hosts]


def _exports(fleet: Fleet) -> str:
    """Return the variables, as words before a command; the launchers hand on the environment."""
    return "".join(f"{name}={shlex.quote(value)} " for name, value in fleet.exports.items())


def _srun(fleet: Fleet, rank_words: tuple[str, ...]) -> tuple[str, ...]:
    counts, nodes = _counts(fleet), contract_hosts(_names(fleet))
    where = f"--nodes={len(counts)}"
    where += "" if nodes == "localhost" else f" --nodelist={shlex.quote(nodes)}"
    if len(set(counts)) == 1:
        tasks = f"--ntasks={sum(counts)} --ntasks-per-node={counts[0]}"
        return (f"{_exports(fleet)}srun {where} {tasks} {shlex.join(rank_words)}",)
    cases = " ".join(f"{slots.host}) n={slots.nproc};;" for slots in fleet.hosts)
    agent = shlex.join([*fleet.interpreter, "-m", "dure.cli", "run", *fleet.flags])
    program = shlex.join(fleet.program)
    script = f"case $SLURMD_NODENAME in {cases} esac; exec {agent} --nproc $n -- {program}"
    line = f"srun {where} --ntasks-per-node=1 sh -c {shlex.quote(script)}"
    return (_exports(fleet) + line,)


def _open_mpi(fleet: Fleet, rank_words: tuple[str, ...]) -> str:
    hosts = ",".join(f"{slots.host}:{slots.nproc or 1}" for slots in fleet.hosts)
    names = "".join(f"-x {name} " for name in fleet.exports)
    return (
        f"{_exports(fleet)}mpirun --host {shlex.quote(hosts)} -n {sum(_counts(fleet))} {names}"
        f"{_address_for(fleet, '-x {}={}')}{shlex.join(rank_words)}"
    )


def _hydra(fleet: Fleet, rank_words: tuple[str, ...]) -> str:
    hosts = ",".join(f"{slots.host}:{slots.nproc or 1}" for slots in fleet.hosts)
    return (
        f"{_exports(fleet)}mpiexec -hosts {shlex.quote(hosts)} -n {sum(_counts(fleet))} "
        f"{_address_for(fleet, '-genv {} {}')}{shlex.join(rank_words)}"
    )


def _address_for(fleet: Fleet, form: str) -> str:
    """Return the words that say where rank 0 is; on one host nobody asks."""
    if len(fleet.hosts) == 1:
        return ""
    host, _, port = fleet.endpoint.rpartition(":")
    told = (("MASTER_ADDR", host.strip("[]")), ("MASTER_PORT", port))
    return "".join(form.format(name, shlex.quote(value)) + " " for name, value in told)


def _agent(fleet: Fleet, number: int | None, nproc: int) -> str:
    """Return an agent's command; without a number, hosts are numbered as they come."""
    words = [*fleet.interpreter, "-m", "dure.cli", "run", *fleet.flags, "--nproc", str(nproc)]
    words += ["--nnodes", str(len(fleet.hosts))]
    if len(fleet.hosts) > 1:
        numbered = [] if number is None else ["--node-rank", str(number)]
        words += ["--rdzv-id", fleet.run_id, "--rdzv-endpoint", fleet.endpoint, *numbered]
    text = shlex.join([*words, "--", *fleet.program])
    return f"cd {shlex.quote(fleet.directory)} && {_exports(fleet)}{text}"


def _clush(fleet: Fleet) -> str:
    counts = _counts(fleet)
    ssh = shlex.join(fleet.ssh_options)
    options = f"-o {shlex.quote(ssh)} " if ssh else ""
    if len(set(counts)) == 1:
        nodes = contract_hosts(_names(fleet))
        agent = shlex.quote(_agent(fleet, None, counts[0]))
        return f"clush {options}-w {shlex.quote(nodes)} {agent}"
    parts: list[str] = []
    for number, slots in enumerate(fleet.hosts):
        agent = shlex.quote(_agent(fleet, number, slots.nproc or 1))
        parts.append(f"clush {options}-w {shlex.quote(slots.host)} {agent}")
    return " & ".join(parts) + " & wait"


def _ssh(fleet: Fleet) -> Iterator[str]:
    options = "".join(f"{shlex.quote(word)} " for word in fleet.ssh_options)
    for number, slots in enumerate(fleet.hosts):
        agent = _agent(fleet, number, slots.nproc or 1)
        yield f"ssh {options}{shlex.quote(slots.host)} {shlex.quote(agent)}"


def _torchrun(fleet: Fleet, rank_words: tuple[str, ...]) -> Iterator[str]:
    host, _, port = fleet.endpoint.rpartition(":")
    head = [fleet.python, "-m", "torch.distributed.run"]
    # torchrun brings the interpreter itself.
    bare = rank_words[0] != fleet.python
    program = ["--no-python", *rank_words] if bare else list(rank_words[len(fleet.interpreter) :])
    for number, nproc in enumerate(_counts(fleet)):
        words = [*head, "--nproc-per-node", str(nproc), "--nnodes", str(len(fleet.hosts))]
        if len(fleet.hosts) > 1:
            words += ["--node-rank", str(number)]
            words += ["--master-addr", host.strip("[]"), "--master-port", port]
        yield _exports(fleet) + shlex.join([*words, *program])
