"""Names of torch.distributed that describe backends and options of calls.

`Backend` is a backend's name and `BackendConfig` says which backend serves which kind of device.
The classes that end in `Options` are what torch's C++ groups take in place of arguments; methods of
a group that take `opts` read `reduceOp` of them, and reductions refuse a `timeout`.
`ProcessGroupGloo` exists so that its error can say what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from dure.comm.backends.base import Backend as BackendObject
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.registry import known_backends, parse_backend, register_backend
from dure.comm.ops import ReduceOp, as_reduce_op, reducible_dtypes
from dure.comm.queries import get_default_backend_for_device
from dure.errors import UsageError

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ProcessGroupGloo",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "supports_complex",
]


class _Listed(type):
    """Makes `backend_list` of the class current: backends may be registered at any time."""

    @property
    def backend_list(cls) -> list[str]:
        """The names of all backends, and "undefined"."""
        return ["undefined", *known_backends()]


class Backend(str, metaclass=_Listed):
    """A backend's name in lower case; `Backend("SHM")` checks that it is a string.

    As torch's, it has a member for each well-known name: `Backend.GLOO`, `Backend.SHM`, ...; and
    `Backend.backend_list`.

    Example:
        ```python
        assert dist.Backend("SHM") == dist.Backend.SHM == "shm"
        assert "gloo" in dist.Backend.backend_list
        ```
    """

    __slots__ = ()

    SHM = "shm"
    HYBRID = "hybrid"
    HYBRID_MPI = "hybrid_mpi"
    THREADS = "threads"
    FAKE = "fake"
    GLOO = "gloo"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"
    XCCL = "xccl"
    UNDEFINED = "undefined"

    def __new__(cls, name: str) -> Backend:
        """Return the name in lower case; raise for anything that is not a string."""
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("the backend must be a string", seen=f"got {name!r}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., BackendObject],
        extended_api: bool = False,
        devices: str | Iterable[str] | None = None,
    ) -> None:
        """Add a backend, with torch's arguments; `dure.register_backend` does the same with fewer.

        Args:
            name: The name that programs pass as `backend`; it also becomes a member of this class.
            func: Makes this rank's part of a group: an object with the methods of
                `dure.comm.backends.base.Backend`. Called with store, rank, size and timeout.
            extended_api: If True, `func` is called with the group's `BackendOptions` and its
                `pg_options`.
            devices: Types of devices whose tensors it takes. None: cpu and cuda.

        Raises:
            UsageError: The name is taken, or is not a plain word.
        """
        kinds = ("cpu", "cuda") if devices is None else devices
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        register_backend(name, partial(_made_by, func, extended_api), kinds)
        setattr(cls, name.upper(), name.lower())


def _made_by(
    func: Callable[..., BackendObject], extended_api: bool, options: BackendOptions
) -> BackendObject:
    if extended_api:
        made = func(options, options.pg_options)
    else:
        made = func(options.store, options.rank, options.size, options.timeout)
    if not hasattr(made, "run"):
        raise UsageError(
            "the function of a registered backend did not return a backend",
            group=options.name,
            seen=f"got a {type(made).__module__}.{type(made).__qualname__}",
            fix="Return an object with the methods of dure.comm.backends.base.Backend. Groups of "
            "torch's own classes run in torch.distributed.",
        )
    return made


class BackendConfig:
    """Which backend serves which kind of device.

    Args:
        backend: A backend's name, or one for each kind of device: "cpu:gloo,cuda:nccl".

    Raises:
        UsageError: A name is unknown, or the text is malformed.

    Example:
        ```python
        config = dist.BackendConfig("cpu:gloo,cuda:nccl")
        assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
        ```
    """

    def __init__(self, backend: str) -> None:
        if backend == Backend.UNDEFINED:
            backend = get_default_backend_for_device("cpu")
        self.device_backend_map = {d: Backend(b) for d, b in parse_backend(str(backend)).items()}

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend of each kind of device."""
        return self.device_backend_map


class ProcessGroupGloo:
    """torch's class of a group over Gloo; a group of Dure is made by the functions of `dure`.

    Raises:
        UsageError: Always; it says what to write.

    Example:
        ```python
        group = dist.new_group(backend="gloo")  # not ProcessGroupGloo(store, rank, size)
        ```
    """

    def __init__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            "groups are not made from ProcessGroupGloo",
            fix='Call dure.init_process_group("gloo"), or dure.new_group(backend="gloo").',
        )


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether a reduction has a meaning for complex numbers.

    Args:
        reduceOp: A reduction, such as `ReduceOp.SUM`.

    Returns:
        True for SUM and others that are defined for complex numbers, False for MIN, MAX, ...

    Example:
        ```python
        assert dist.supports_complex(dist.ReduceOp.SUM)
        assert not dist.supports_complex(dist.ReduceOp.MAX)
        ```
    """
    return torch.complex64 in reducible_dtypes(as_reduce_op(reduceOp))


_NO_LIMIT = timedelta(milliseconds=-1)


@dataclass(slots=True)
class _Options:
    """The fields of all options.

    Attributes:
        timeout: Negative: the group's timeout. Methods of groups take no other.
        asyncOp: Whether the call only starts the operation; methods that take options always do.
    """

    timeout: timedelta = _NO_LIMIT
    asyncOp: bool = True


@dataclass(slots=True)
class AllreduceOptions(_Options):
    """Options of `allreduce`: `reduceOp`.

    Example:
        ```python
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        tensor = torch.tensor([float(dist.get_rank())])
        dist.group.WORLD.allreduce([tensor], options).wait()
        assert tensor.item() == 1.0
        ```
    """

    reduceOp: Any = field(default_factory=lambda: ReduceOp.SUM)
    sparseIndices: torch.Tensor | None = None


@dataclass(slots=True)
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of `allreduce_coalesced`: `reduceOp`.

    Example:
        ```python
        options = dist.AllreduceCoalescedOptions(reduceOp=dist.ReduceOp.MIN)
        tensors = [torch.ones(1), torch.ones(2)]
        dist.group.WORLD.allreduce_coalesced(tensors, options).wait()
        ```
    """


@dataclass(slots=True)
class BroadcastOptions(_Options):
    """Options of `broadcast`: `rootRank`, a rank of the group.

    Example:
        ```python
        options = dist.BroadcastOptions(rootRank=1)
        tensor = torch.tensor([float(dist.get_rank())])
        dist.broadcast(tensor, group_src=options.rootRank)
        assert tensor.item() == 1.0
        ```
    """

    rootRank: int = 0
    rootTensor: int = 0


@dataclass(slots=True)
class ReduceOptions(BroadcastOptions):
    """Options of `reduce`: `reduceOp`, and `rootRank`, a rank of the group.

    Example:
        ```python
        options = dist.ReduceOptions(rootRank=0, reduceOp=dist.ReduceOp.SUM)
        ```
    """

    reduceOp: Any = field(default_factory=lambda: ReduceOp.SUM)


@dataclass(slots=True)
class AllgatherOptions(_Options):
    """Options of `allgather`."""


@dataclass(slots=True)
class GatherOptions(_Options):
    """Options of `gather`: `rootRank`, a rank of the group.

    Example:
        ```python
        options = dist.GatherOptions(rootRank=0)
        ```
    """

    rootRank: int = 0


@dataclass(slots=True)
class ScatterOptions(GatherOptions):
    """Options of `scatter`: `rootRank`, a rank of the group.

    Example:
        ```python
        options = dist.ScatterOptions(rootRank=0)
        ```
    """


@dataclass(slots=True)
class ReduceScatterOptions(_Options):
    """Options of `reduce_scatter`: `reduceOp`.

    Example:
        ```python
        options = dist.ReduceScatterOptions(reduceOp=dist.ReduceOp.AVG)
        ```
    """

    reduceOp: Any = field(default_factory=lambda: ReduceOp.SUM)


@dataclass(slots=True)
class BarrierOptions(_Options):
    """Options of `barrier`.

    Example:
        ```python
        options = dist.BarrierOptions(device_ids=[0])
        ```
    """

    device_ids: list[int] = field(default_factory=list[int])
    device: torch.device | None = None


@dataclass(slots=True)
class AllToAllOptions(_Options):
    """Options of `alltoall`.

    Example:
        ```python
        options = dist.AllToAllOptions()
        ```
    """
