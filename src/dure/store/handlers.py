"""Stores by URL, as `torch.distributed.rendezvous` gives them, and schemes that programs add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from dure.errors import RendezvousError, UsageError
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.init_method import read_init_method

__all__ = ["found_by_handler", "register_rendezvous_handler", "rendezvous"]

Found = Iterator[tuple[Store, int, int]]

_OWN = ("env", "tcp", "file", "etcd")
_handlers: dict[str, Callable[..., Found]] = {}


def register_rendezvous_handler(scheme: str, handler: Callable[..., Found]) -> None:
    """Let `init_method="SCHEME://..."` call a function.

    Args:
        scheme: The part before `://`; not one of `env`, `tcp`, `file`, `etcd`.
        handler: Called with the URL, in whose query are the rank and the world size if they are
            known, and the timeout as a keyword argument; yields (store, rank, world size).

    Raises:
        UsageError: The scheme has a handler.

    Example:
        ```python
        def through_a_file(url, timeout=None, **options):
            yield dist.FileStore(f"rendezvous{dist.get_rank()}", 1), 0, 1

        dist.register_rendezvous_handler("memo", through_a_file)
        store, rank, world_size = next(dist.rendezvous("memo://here"))
        assert (rank, world_size) == (0, 1)
        ```
    """
    if scheme in _OWN or scheme in _handlers:
        raise UsageError("the scheme has a rendezvous handler already", seen=f"{scheme}://")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Found:
    """Yield (store, rank, world size) once; `next` of it opens the store.

    Args:
        url: `env://`, `tcp://HOST:PORT`, `file:///PATH`, `etcd://HOST:PORT/JOB`, or a scheme of
            `register_rendezvous_handler`.
        rank: This rank; -1 if the URL or the environment has it.
        world_size: How many ranks there are; -1 likewise.
        kwargs: `timeout` (a timedelta); all of them go to a registered handler.

    Yields:
        The store, this rank, and the world size.

    Raises:
        RendezvousError: The URL is malformed, a number is missing, or it is iterated further.
        StoreError: The store cannot be opened.

    Example:
        ```python
        path = Path(f"store{dist.get_rank()}").absolute()
        store, rank, world_size = next(dist.rendezvous(f"file://{path}", rank=0, world_size=1))
        store.set("ready", "yes")
        assert store.get("ready") == b"yes"
        ```
    """
    found = found_by_handler(url, rank, world_size, **kwargs)
    return _opened(url, rank, world_size, **kwargs) if found is None else found


def found_by_handler(url: str, rank: int, world_size: int, **kwargs: Any) -> Found | None:
    """Return what the registered handler of a URL's scheme returns; None if there is none."""
    parts = urlsplit(url)
    if parts.scheme not in _handlers:
        return None
    numbers = {"rank": rank, "world_size": world_size}
    known = [parts.query, *(f"{name}={number}" for name, number in numbers.items() if number >= 0)]
    query = "&".join(filter(None, known))
    return _handlers[parts.scheme](parts._replace(query=query).geturl(), **kwargs)


def _opened(
    url: str, rank: int, world_size: int, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Found:
    method = read_init_method(url, rank, world_size)
    store = method.endpoint.open(method.rank, method.world_size, timeout.total_seconds())
    yield store, method.rank, method.world_size
    raise RendezvousError(
        "this rendezvous has already returned its store", fix="Call rendezvous() again."
    )
