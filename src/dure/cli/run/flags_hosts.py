"""The flags for several hosts: who takes part, and where they meet."""

from __future__ import annotations

from pathlib import Path

from dure.cli.run.flag import Flag, Group
from dure.cli.run.values import config, nnodes, number, seconds

__all__ = ["HOSTS", "RENDEZVOUS_CONFIG"]


def _truth(text: str) -> bool:
    if text.lower() in {"1", "true", "t", "yes", "y"}:
        return True
    if text.lower() in {"0", "false", "f", "no", "n"}:
        return False
    raise ValueError("1 or 0 (or true, false)")


def _store_type(text: str) -> str:
    if text.lower() != "tcp":
        raise ValueError("tcp: hosts meet at --rdzv-endpoint, not in a file")
    return text


RENDEZVOUS_CONFIG = {
    "join_timeout": seconds,
    "last_call_timeout": seconds,
    "timeout": seconds,
    "is_host": _truth,
    "quorum": _truth,
    "store_type": _store_type,
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), seconds),
    **dict.fromkeys(("keep_alive_interval", "keep_alive_max_attempt"), seconds),
}
"""The keys of --rdzv-conf. Those of the last two lines change nothing: a host that has gone is
noticed by the end of its connection, and nothing waits for a rendezvous to close."""


def _backend(text: str) -> str:
    if text in {"c10d", "static"}:
        return text
    if text.startswith("etcd"):
        raise ValueError(
            "c10d or static: no etcd is needed, for the hosts meet at --rdzv-endpoint HOST:PORT, "
            "where HOST is one of them"
        )
    raise ValueError("c10d or static")


HOSTS = (
    Flag(
        name="hosts",
        spellings=("--hosts",),
        group=Group.HOSTS,
        metavar="NODES",
        means="Start the job on these hosts over ssh, such as node[1-4,7].",
    ),
    Flag(
        name="hostfile",
        spellings=("--hostfile",),
        group=Group.HOSTS,
        metavar="FILE",
        parse=Path,
        means="The same from a file, a host a line; slots=N says how many ranks it gets.",
    ),
    Flag(
        name="dry_run",
        spellings=("--dry-run",),
        group=Group.HOSTS,
        means="Start nothing: show the equivalent lines for srun, mpirun, clush and torchrun.",
    ),
    Flag(
        name="exports",
        spellings=("-x", "--export"),
        group=Group.HOSTS,
        metavar="NAME[=VALUE]",
        means="With --hosts: set this variable there, too; may be given several times.",
        repeats=True,
    ),
    Flag(
        name="remote_python",
        spellings=("--remote-python",),
        group=Group.HOSTS,
        metavar="PATH",
        default="the path of this one",
        means="With --hosts: the interpreter on the hosts.",
    ),
    Flag(
        name="ssh_options",
        spellings=("--ssh-option",),
        group=Group.HOSTS,
        metavar="OPTION",
        means="With --hosts: an option for ssh, such as -p2222; may be given several times.",
        repeats=True,
    ),
    Flag(
        name="leash",
        spellings=("--leash",),
        group=Group.HOSTS,
        means="End when the standard input ends; how --hosts holds the hosts it started on.",
    ),
    Flag(
        name="nnodes",
        spellings=("--nnodes",),
        group=Group.HOSTS,
        metavar="N|MIN:MAX",
        parse=nnodes,
        default="1",
        means="How many hosts take part; this command is then given on each of them.",
        torchrun="--nnodes",
        pet="NNODES",
    ),
    Flag(
        name="endpoint",
        spellings=("--rdzv-endpoint",),
        group=Group.HOSTS,
        metavar="HOST:PORT",
        means="Where the hosts meet: one of them, and a free port there.",
        default="port 29400",
        torchrun="--rdzv-endpoint",
        pet="RDZV_ENDPOINT",
        differs="With one host there is nobody to meet, and it is not looked at.",
    ),
    Flag(
        name="run_id",
        spellings=("--rdzv-id",),
        group=Group.HOSTS,
        metavar="NAME",
        means="The job's name, the same on all hosts.",
        default="made up; with several hosts: none",
        torchrun="--rdzv-id",
        pet="RDZV_ID",
    ),
    Flag(
        name="backend",
        spellings=("--rdzv-backend",),
        group=Group.HOSTS,
        metavar="c10d|static",
        parse=_backend,
        means="c10d: hosts are numbered as they come. static: by --node-rank, and none may be "
        "missing.",
        default="static with --node-rank or --master-addr, else c10d",
        torchrun="--rdzv-backend",
        pet="RDZV_BACKEND",
        differs="Either way Dure's own encrypted store is at the endpoint. etcd is refused: none "
        "is needed.",
    ),
    Flag(
        name="config",
        spellings=("--rdzv-conf",),
        group=Group.HOSTS,
        metavar="KEY=VALUE,...",
        parse=config(RENDEZVOUS_CONFIG),
        means="join_timeout (or timeout), last_call_timeout in seconds; is_host, quorum: 1 or 0.",
        default="join_timeout=600,last_call_timeout=5,quorum=1",
        torchrun="--rdzv-conf",
        pet="RDZV_CONF",
        differs="close_timeout, heartbeat_timeout, read_timeout and keep_alive_* change nothing: "
        "a host's end is seen at once. store_type=file and unknown keys are refused.",
    ),
    Flag(
        name="node_rank",
        spellings=("--node-rank",),
        group=Group.HOSTS,
        metavar="N",
        parse=number(0),
        means="This host's number, with --rdzv-backend static.",
        torchrun="--node-rank",
        pet="NODE_RANK",
    ),
    Flag(
        name="master_addr",
        spellings=("--master-addr",),
        group=Group.HOSTS,
        metavar="HOST",
        default="127.0.0.1",
        means="The host of rank 0, with --rdzv-backend static.",
        torchrun="--master-addr",
        pet="MASTER_ADDR",
    ),
    Flag(
        name="master_port",
        spellings=("--master-port",),
        group=Group.HOSTS,
        metavar="PORT",
        parse=number(1),
        default="free; with several hosts 29500",
        means="One host: what ranks find as MASTER_PORT. Several: the endpoint's port.",
        torchrun="--master-port",
        pet="MASTER_PORT",
        differs="With several hosts, ranks find another free port of rank 0's host as MASTER_PORT.",
    ),
    Flag(
        name="local_addr",
        spellings=("--local-addr",),
        group=Group.HOSTS,
        metavar="ADDRESS",
        default="found",
        means="By which address other hosts reach this one.",
        torchrun="--local-addr",
        pet="LOCAL_ADDR",
    ),
    Flag(
        name="standalone",
        spellings=("--standalone",),
        group=Group.HOSTS,
        means="One host, whatever the flags of --rdzv say.",
        torchrun="--standalone",
        pet="STANDALONE",
    ),
)
