"""The backends by name, and how one is made.

Dure's own backends are imported on first use, so that a program that never names `nccl` does not
load its dependencies; others are added by `register_backend`. A backend may also be chosen for each
type of device: "cpu:gloo,cuda:nccl" (`parse_backend`). Dure's backends for CPU tensors also serve
those of accelerators, by staging copies on the host (staged.py).

The ranks of a group exchange their arguments once, through the store. A backend whose ranks need
addresses or the like of each other may add these to that exchange: its `Opening` has the *offer* of
this rank, *connects* with the offers of all ranks, and is *complete* when all have connected. So
any number of groups takes one exchange. Nothing waits before `complete`; several groups are first
all connected and then all completed, in the same order on every rank. Other backends are made by
their factory and use the group's store.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Protocol

import torch

from dure.comm.backends.base import Backend, BackendFactory, BackendOptions
from dure.errors import UsageError

_BOUND = b"bound"


class Opening(Protocol):
    """This rank's part of a backend that is being created."""

    @property
    def offer(self) -> bytes:
        """The data that the other ranks need to connect to this one."""
        ...

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect to the other ranks by their offers, in the order of group ranks; do not wait."""
        ...

    def complete(self) -> Backend:
        """Return the backend when all ranks have connected."""
        ...

    def withdraw(self) -> None:
        """Release everything; safe to call at any time, also twice."""
        ...


class FactoryOpening:
    """The opening of a backend that its factory makes, in `complete`.

    The offers say whether ranks are bound to devices (`BackendOptions.all_bound`).
    """

    def __init__(self, factory: BackendFactory, options: BackendOptions) -> None:
        self._factory, self._options = factory, options

    @property
    def offer(self) -> bytes:
        device = self._options.device_id
        return b"" if device is None or device.type in {"cpu", "meta"} else _BOUND

    def connect(self, offers: Sequence[bytes]) -> None:
        all_bound = len(offers) > 0 and all(offer == _BOUND for offer in offers)
        self._options = replace(self._options, all_bound=all_bound)

    def complete(self) -> Backend:
        return self._factory(self._options)

    def withdraw(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Entry:
    """A backend by name: the device types it takes, and its factory.

    The factory may be given as "module:attribute" below this package. If `opens`, it makes an
    `Opening` instead of the backend. If `stages`, it also serves tensors of accelerators.
    """

    devices: tuple[str, ...]
    factory: BackendFactory | str
    opens: bool = False
    stages: bool = False

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The device types that its bare name means, in this build of torch."""
        accelerator = torch.accelerator.current_accelerator()
        staged = set() if accelerator is None else {accelerator.type}.difference(self.devices)
        return (*self.devices, *filter(self.takes, staged))

    def takes(self, device: str) -> bool:
        """Return whether it serves tensors on devices of this type."""
        return device in self.devices or (self.stages and _has_streams(device))

    def open(self, options: BackendOptions) -> Opening:
        if not isinstance(self.factory, str):
            return FactoryOpening(self.factory, options)
        module, _, attribute = self.factory.partition(":")
        made_by = getattr(importlib.import_module(f"dure.comm.backends.{module}"), attribute)
        return made_by(options) if self.opens else FactoryOpening(made_by, options)


_OURS: Mapping[str, _Entry] = {
    "threads": _Entry(("cpu",), "threads.backend:ThreadsOpening", opens=True, stages=True),
    "shm": _Entry(("cpu",), "shm.opening:ShmOpening", opens=True, stages=True),
    "gloo": _Entry(("cpu",), "torch_engine:GlooOpening", opens=True, stages=True),
    "mpi": _Entry(("cpu",), "mpi.backend:create_mpi", stages=True),
    "hybrid": _Entry(("cpu",), "hybrid.creation:create_over_gloo", stages=True),
    "hybrid_mpi": _Entry(("cpu",), "hybrid.creation:create_over_mpi", stages=True),
    "nccl": _Entry(("cuda",), "torch_engine:create_nccl"),
    "fake": _Entry(("cpu", "cuda", "hpu", "xpu"), "fake:FakeBackend"),
}
_registered: dict[str, _Entry] = {}


def register_backend(name: str, factory: BackendFactory, devices: Iterable[str] = ("cpu",)) -> None:
    """Add a custom backend.

    Args:
        name: The name that programs pass as `backend`; converted to lower case.
        factory: Called on every rank with the group's `BackendOptions`.
        devices: Types of `torch.device` whose tensors it takes.

    Raises:
        UsageError: The name is taken, or is not a plain word.

    Example:
        ```python
        from dure.comm.backends.base import Backend, BackendOptions

        def make(options: BackendOptions) -> Backend:
            raise NotImplementedError("a class that sends and receives")

        dist.register_backend("carrier_pigeon", make)
        assert dist.is_backend_available("carrier_pigeon")
        ```
    """
    name = name.lower()
    if not name.isidentifier():
        raise UsageError("a backend's name must be a plain word", seen=repr(name))
    if name in _OURS or name in _registered:
        raise UsageError(f"there is a backend {name!r} already", fix="Choose another name.")
    _registered[name] = _Entry(tuple(devices), factory)


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` added; groups that use it are not touched."""
    if _registered.pop(name.lower(), None) is None:
        raise UsageError(f"no backend {name!r} was registered")


def known_backends() -> list[str]:
    """Return the names that can be given as `backend`; some may not run on this machine.

    Example:
        ```python
        assert {"shm", "gloo", "threads"} <= set(dist.known_backends())
        ```
    """
    return [*_OURS, *_registered]


def device_types_of(name: str) -> tuple[str, ...]:
    """Return the device types that the backend `name` takes without staging."""
    return _entry(name).devices


def open_backend(name: str, options: BackendOptions) -> Opening:
    """Begin this rank's part of a backend; every rank of the group must do so.

    Args:
        name: One of `known_backends()`.
        options: Of the group, on this rank.

    Raises:
        UsageError: There is no such backend, or it cannot run on this machine.
    """
    return _entry(name).open(options)


def parse_backend(spec: str) -> dict[str, str]:
    """Split "cpu:gloo,cuda:nccl", or a bare name, into backend names by device type.

    Returns:
        Device type to backend name. A bare name means all device types that the backend takes; of
        accelerators that it stages, only the one that this torch was built for.

    Raises:
        UsageError: A name is unknown, a device type is named twice, or the text is malformed.
    """
    if ":" not in spec:
        name = spec.strip().lower()
        return dict.fromkeys(_entry(name).all_devices, name)
    parsed: dict[str, str] = {}
    for part in spec.split(","):
        device, colon, name = (x.strip().lower() for x in part.partition(":"))
        if not (device and colon and name):
            raise _malformed(spec, f"{part.strip()!r} is not DEVICE:BACKEND")
        if device in parsed:
            raise _malformed(spec, f"{device!r} is named twice")
        if not _entry(name).takes(device):
            takes = ", ".join(_entry(name).devices)
            raise _malformed(spec, f"the backend {name!r} takes {takes}, not {device}")
        parsed[device] = name
    return parsed


def check_pg_options(names: Collection[str], given: object) -> None:
    """Raise unless one of a group's backends uses the `pg_options` that the program gave.

    Every backend takes ``{"verify": True}`` (comm/backends/verify.py), nccl also torch's options of
    its groups, and registered backends any options.

    Raises:
        UsageError: None of the backends would use them.
    """
    if given is None or any(name in _registered or name == "fake" for name in names):
        return
    if isinstance(given, Mapping):
        unknown = sorted(map(str, set(given) - {"verify"}))  # pyright: ignore[reportUnknownArgumentType]
        if not unknown:
            return
        seen = f"unknown: {', '.join(unknown)}"
    elif type(given).__qualname__ == "ProcessGroupNCCL.Options" and "nccl" in names:
        return
    else:
        seen = f"got a {type(given).__module__}.{type(given).__qualname__}"
    raise UsageError(
        f"the backend {', '.join(names)} does not use these pg_options",
        seen=seen,
        fix="Leave pg_options out, or give {'verify': True}; nccl also takes "
        "ProcessGroupNCCL.Options.",
    )


def _entry(name: str) -> _Entry:
    entry = _OURS.get(name.lower()) or _registered.get(name.lower())
    if entry is None:
        near = get_close_matches(name.lower(), known_backends(), 1)
        raise UsageError(
            f"there is no backend {name!r}",
            fix=(f"Did you mean {near[0]!r}? " if near else "")
            + f"Use one of {', '.join(known_backends())}.",
        )
    return entry


def _has_streams(device: str) -> bool:
    """Return whether devices of this type are accelerators with streams."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # no type of device, or none of this torch
        return False
    return device != "cpu" and hasattr(module, "current_stream")


def _malformed(spec: str, seen: str) -> UsageError:
    return UsageError(
        f"the backend {spec!r} cannot be understood",
        seen=seen,
        fix='Give one name, or one for each type of device, e.g. "cpu:gloo,cuda:nccl".',
    )
