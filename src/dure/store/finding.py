"""From an `init_method` and the environment to a `Spot`: where the store is, and who we are there.

`env://` reads torch's variables. What they leave open is taken from the cluster around this process
if there is one (`dure.store.clusters`); an error names what is then still missing.
"""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from dure import env
from dure.errors import RendezvousError
from dure.store.clusters import find_in_cluster
from dure.store.places import EtcdPlace, FilePlace, LocalPlace, Place, Spot, TcpPlace, port_after

__all__ = ["find_place"]


def find_place(init_method: str | None, rank: int, world_size: int) -> Spot:
    """Read an `init_method`; numbers given as arguments go before those of the URL or environment.

    Raises:
        RendezvousError: It is malformed, or an environment variable is missing.
    """
    url = init_method or "env://"
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    rank = rank if rank >= 0 or "rank" not in query else _number(url, query["rank"])
    if world_size < 0 and "world_size" in query:
        world_size = _number(url, query["world_size"])
    if parts.scheme == "env":
        return _from_environment(rank, world_size)
    if parts.scheme == "tcp":
        place: Place = _tcp_place(url)
    elif parts.scheme == "file":
        place = _file_place(url)
    elif parts.scheme == "etcd":
        place = EtcdPlace(url=url, name="etcd")
    else:
        raise RendezvousError(
            "init_method cannot be understood",
            seen=repr(url),
            fix="Write env://, tcp://HOST:PORT, file:///PATH or etcd://HOST:PORT/JOB.",
        )
    if rank == -1 or world_size == -1:
        missing = [n for n, v in (("rank", rank), ("world_size", world_size)) if v == -1]
        raise RendezvousError(
            f"{' and '.join(missing)} must be given with {parts.scheme}://",
            fix=f"Pass {', '.join(f'{name}=...' for name in missing)} to init_process_group.",
        )
    return Spot(place=place, rank=rank, world_size=world_size)


def _tcp_place(url: str) -> TcpPlace:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise RendezvousError(
            "init_method names no host and port", seen=repr(url), fix="Write tcp://HOST:PORT."
        )
    return TcpPlace(host=host, port=port, name="tcp")


def _file_place(url: str) -> FilePlace:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise RendezvousError(
            "init_method names no file",
            seen=repr(url),
            fix="Write file:// and an absolute path, which makes three slashes: file:///PATH.",
        )
    return FilePlace(path=parts.path)


def _number(url: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RendezvousError(
            "init_method holds something that is not a whole number", seen=f"{value!r} in {url!r}"
        ) from None


def _from_environment(rank: int, world_size: int) -> Spot:
    launcher = env.text("DURE_STORE_ADDR")
    if not launcher and not _all_told(rank, world_size):
        spot = find_in_cluster(rank, world_size)
        if spot is not None:
            return spot
    needed = ["RANK"] if rank == -1 else []
    needed += ["WORLD_SIZE"] if world_size == -1 else []
    needed += [] if launcher else ["MASTER_ADDR", "MASTER_PORT"]
    _require(needed)
    rank = (env.integer("RANK", -1) or 0) if rank == -1 else rank
    world_size = (env.integer("WORLD_SIZE", -1) or 0) if world_size == -1 else world_size
    return Spot(place=_environment_place(launcher, world_size), rank=rank, world_size=world_size)


def _all_told(rank: int, world_size: int) -> bool:
    """Tell whether arguments and torch's variables leave nothing to find."""
    names = ["MASTER_ADDR", "MASTER_PORT"]
    names += [n for n, given in (("RANK", rank), ("WORLD_SIZE", world_size)) if given == -1]
    return all(env.text(name) is not None for name in names)


def _require(names: list[str]) -> None:
    """Say in one error everything that is missing."""
    missing = [name for name in names if env.text(name) is None]
    if len(missing) <= 1:
        for name in missing:
            env.require(name, "init_process_group with env://")
        return
    raise RendezvousError(
        f"the environment variables {', '.join(missing)} are missing",
        seen="; ".join(f"{name}: {env.VARIABLES[name].meaning}" for name in missing),
        fix="Start the program with `dure run --nproc 2 PROGRAM`, or set "
        + " ".join(f"{name}={env.VARIABLES[name].example}" for name in missing)
        + ", or pass init_method=, rank= and world_size=.",
    )


def _environment_place(launcher: str | None, world_size: int) -> Place:
    host, port = env.text("MASTER_ADDR") or "", env.integer("MASTER_PORT", 0) or 0
    run = env.text("TORCHELASTIC_RUN_ID") or ""
    name = f"{run} {env.text('TORCHELASTIC_RESTART_COUNT') or 0} {host}:{port}"
    if launcher and launcher.startswith("etcd://"):
        return EtcdPlace(url=launcher, name=name, hosted=True)
    if launcher:
        where, _, number = launcher.rpartition(":")
        if not where or not number.isdecimal():
            raise RendezvousError(
                "the environment variable DURE_STORE_ADDR is not HOST:PORT", seen=repr(launcher)
            )
        return TcpPlace(
            host=where, port=int(number), name=name, hosted=True, purpose="DURE_STORE_ADDR"
        )
    if not 0 < port < 65536:
        raise RendezvousError(
            "the environment variable MASTER_PORT is no port",
            seen=f"{port}; it means {env.VARIABLES['MASTER_PORT'].meaning}",
            fix="Set it to a free port between 1024 and 65535.",
        )
    if env.flag("TORCHELASTIC_USE_AGENT_STORE"):
        if env.integer("LOCAL_WORLD_SIZE") == world_size:
            return LocalPlace(name=name)
        port = port_after(port)
        return TcpPlace(host=host, port=port, name=name, job=name, purpose="MASTER_ADDR")
    return TcpPlace(host=host, port=port, name="tcp", purpose="MASTER_ADDR")
