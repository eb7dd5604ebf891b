"""Torch's own process groups as engines: Gloo, NCCL, and any other `Backend` object of torch.

Torch's classes are used as plain objects: the global state of torch.distributed is not touched, and
`torch.distributed.init_process_group` is never called. `EngineGroup` makes a backend of them.

Gloo cannot abort. But a receive that times out makes it close all connections of its group, which
ends pending operations here and shows the peers that this rank has left. So a group is aborted by a
receive that times out at once.

Gloo reads its peers' addresses from a store of torch's kind, and waits there for them. It gets one
that is not shared: the addresses are part of the exchange in which the ranks create the group
(`GlooOpening`). They are loopback addresses if all ranks are on one host; otherwise those of the
interface that routes to the store (store/address.py). NCCL uses Dure's store through an adapter.

All ranks of a group are connected when it is made, not at its first use: a rank that is not
connected cannot see that a peer has died (docs/decisions/0009-hosts.md).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from dure import env
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.engine.group import EngineGroup
from dure.comm.backends.engine.work import EngineState, EngineWork
from dure.comm.backends.reachability import find_unconnected
from dure.errors import CommError, CommTimeout, DureError, PeerLost, UsageError
from dure.store.address import outward_address
from dure.store.base import Store
from dure.store.interfaces import chosen_address
from dure.store.wire import encode
from dure.torch_private import ProcessGroupNCCL, c10d

__all__ = ["ENGINE_OPS", "EngineCalls", "GlooOpening", "connect_nccl", "create_gloo", "create_nccl"]

Engine = Any  # torch's Backend, whose stub leaves the collectives out
_POISON = timedelta(milliseconds=1)
_POISON_TAG = 0x7FFFFFF0
_LOOK_S = 0.05
_ADDRESS = "engine/address"
_UNCONNECTED = "engine/unconnected"
"""Set by the first rank that could not connect, so that the others stop waiting."""
_OF_A_PEER = (CommTimeout, PeerLost)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_END_PROCESS = "1"
"""What torch's watchdog of NCCL does after an error: the launcher's value, for stock PyTorch."""
_ABORT_ONLY = "2"
"""The same, for Dure's groups: abort the communicators."""
_WATCHDOG_MARGIN = timedelta(seconds=60)
"""By how much Dure's watchdog is earlier than torch's (engine/watchdog.py)."""
ENGINE_OPS = {
    name: getattr(c10d.ReduceOp, name)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
}
"""Torch's reductions by name."""


class EngineCalls:
    """The calls of an engine. Each starts its work at once and does not wait for peers.

    Tensors are flat, contiguous, not empty, and of one length on all ranks; `op` is the name of a
    reduction. Engines raise RuntimeError.
    """

    name: str
    device_types: frozenset[str]
    in_stream: bool
    """It orders its work by CUDA streams: waiting does not block the host."""
    bitwise: bool
    """It has BAND, BOR and BXOR."""
    native_floats: bool
    """It reduces floats of 16 bits, and averages floats."""
    any_source: bool
    """It can receive from any rank."""
    reduce_scatters: bool
    """It has a reduce_scatter. Gloo's is an all_reduce, whose work does not report its end."""
    splits = False
    """Groups can be split off it, because all ranks are bound to devices: see comm/splitting.py."""

    def __init__(self, engine: Engine, options: BackendOptions) -> None:
        self._engine = engine
        self._rank, self._size = options.rank, options.size
        self._peers = [r for r in range(options.size) if r != options.rank]

    def all_reduce(self, wire: torch.Tensor, op: str) -> EngineWork:
        """Reduce in place."""
        options = c10d.AllreduceOptions()
        options.reduceOp = ENGINE_OPS[op]
        return self._engine.allreduce([wire], options)

    def reduce(self, wire: torch.Tensor, op: str, dst: int) -> EngineWork:
        """Reduce in place on `dst`; elsewhere `wire` is scratch memory."""
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = ENGINE_OPS[op], dst
        return self._engine.reduce([wire], options)

    def reduce_scatter(self, output: torch.Tensor, wire: torch.Tensor, op: str) -> EngineWork:
        """Reduce `wire` [n*k]; rank i's part goes to `output` [k]."""
        options = c10d.ReduceScatterOptions()
        options.reduceOp = ENGINE_OPS[op]
        return self._engine._reduce_scatter_base(output, wire, options)

    def broadcast(self, wire: torch.Tensor, src: int) -> EngineWork:
        """Copy that of `src` to all."""
        options = c10d.BroadcastOptions()
        options.rootRank = src
        return self._engine.broadcast([wire], options)

    def all_gather(self, output: torch.Tensor, wire: torch.Tensor) -> EngineWork:
        """Copy rank i's `wire` [k] to `output` [n*k] at i*k."""
        return self._engine._allgather_base(output, wire)

    def exchange(
        self, output: torch.Tensor, wire: torch.Tensor, takes: list[int], gives: list[int]
    ) -> EngineWork:
        """Send `gives[j]` elements to rank j, take `takes[i]` of rank i; both empty: equal parts.

        Here tensors may be empty, and of different lengths.
        """
        return self._engine.alltoall_base(output, wire, takes, gives)

    def barrier(self) -> EngineWork:
        """End when all ranks have called."""
        raise NotImplementedError

    def send(self, wire: torch.Tensor, dst: int, tag: int) -> EngineWork:
        """Send to `dst`."""
        return self._engine.send([wire], dst, tag)

    def recv(self, wire: torch.Tensor, src: int | None, tag: int) -> EngineWork:
        """Receive from `src`, or from any rank if None."""
        if src is None:
            return self._engine.recv_anysource([wire], tag)
        return self._engine.recv([wire], src, tag)

    def begin_batch(self) -> None:
        """Hold back the operations that follow, until `end_batch`."""
        self._engine._start_coalescing()

    def end_batch(self) -> EngineWork | None:
        """Start them together. Return None if there were none."""
        return self._engine._end_coalescing()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long work that begins later may take."""
        self._engine._set_default_timeout(timeout)

    def split_off(self, parent: EngineCalls, color: int) -> EngineWork:
        """Make the communicator by a split of the parent's; all ranks of the parent call at once.

        Args:
            parent: With a communicator that has no operation under way.
            color: The ranks that pass this one make a communicator; more than 0.

        Returns:
            The work of a first operation.
        """
        raise NotImplementedError

    def sit_out_split(self) -> None:
        """Take part in a split of this communicator, as a rank of none of the new ones."""
        raise NotImplementedError

    def leave(self) -> None:
        """End in good order; nothing is pending."""

    def break_off(self) -> None:
        """Close the connections to all peers, so that what is pending fails, here and there."""
        raise NotImplementedError


class _Gloo(EngineCalls):
    """Gloo's particulars."""

    name = "gloo"
    device_types = frozenset({"cpu"})
    in_stream, bitwise, any_source, native_floats = False, True, True, False
    reduce_scatters = False

    def barrier(self) -> EngineWork:
        return self._engine.barrier()

    # To leave in order: connections close when the last reference to the engine is gone.

    def break_off(self) -> None:
        """Close the connections by a receive that times out at once."""
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in self._peers:
            try:
                self._engine.recv([nothing], peer, _POISON_TAG).wait(_POISON)
            except RuntimeError as e:
                if "Timed out" in str(e):
                    return  # else this connection was closed already: try another


class _Nccl(EngineCalls):
    """NCCL's particulars."""

    in_stream, bitwise, any_source, native_floats = True, False, False, True
    reduce_scatters = True

    def __init__(
        self,
        engine: Engine,
        name: str,
        device_type: str,
        options: BackendOptions,
        store: _StoreBridge,
        margin: timedelta,
        settings: Any,
    ) -> None:
        super().__init__(engine, options)
        self._margin, self._settings = margin, settings
        self.splits = options.all_bound and bool(getattr(engine, "supports_splitting", False))
        self.name, self.device_types = name, frozenset({device_type})
        self._store = store  # see `_StoreBridge`
        self._device = options.device_id or torch.device(device_type)

    def barrier(self) -> EngineWork:
        return self._engine.allreduce([torch.zeros(1, dtype=torch.uint8, device=self._device)])

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(_longer(timeout, self._margin))

    def split_off(self, parent: EngineCalls, color: int) -> EngineWork:
        # Torch reads these when it makes the communicator, at the first operation.
        # `eager_connect_single_device` would do that, too; but then messages of two ranks share
        # the group's communicator and its order, other than in groups that were not split off.
        settings = self._settings
        settings.split_from, settings.split_color = parent._engine, color
        try:
            return self.barrier()
        finally:
            settings.split_from = None

    def sit_out_split(self) -> None:
        self._engine.perform_nocolor_split(self._device)

    def leave(self) -> None:
        self._engine.shutdown()

    def break_off(self) -> None:
        self._engine.abort()


class _StoreBridge(c10d.Store):
    """Dure's store as a store of torch's kind.

    C++ keeps only the C++ part of such an object. If the Python part is collected, calls from C++
    fail; so the backend keeps the bridge, and the bridge its clones.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store = store
        self._clones: list[_StoreBridge] = []

    def clone(self) -> _StoreBridge:
        self._clones.append(_StoreBridge(self._store))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def deleteKey(self, key: str) -> bool:
        return self._store.delete_key(key)

    def getNumKeys(self) -> int:
        return self._store.num_keys()

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return True


class _Addresses(c10d.Store):
    """A store for Gloo: it receives this rank's address, and returns those of all ranks."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.own: Future[bytes] = Future()
        self.all: Future[Sequence[bytes]] = Future()

    def set(self, key: str, value: str | bytes) -> None:
        self.own.set_result(encode(value, "set"))

    def get(self, key: str) -> bytes:
        return self.all.result()[int(key.rpartition("/")[2])]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.all.result()

    def has_extended_api(self) -> bool:
        return False


class GlooOpening:
    """This rank's part of a Gloo group that is being created (see `registry.Opening`).

    Torch's class returns when it is connected, and asks for the addresses in between: so it is made
    on a thread, which ends when it is connected or the opening withdrawn.

    Raises:
        UsageError: Torch was built without Gloo.
    """

    def __init__(self, options: BackendOptions) -> None:
        cls = getattr(c10d, "ProcessGroupGloo", None)
        if cls is None:
            raise UsageError(
                "this torch was built without Gloo", fix="Use the shm backend, or another torch."
            )
        settings = cls._Options()
        self._address, self._began = _own_address(options), time.monotonic()
        settings._devices = [cls.create_device(hostname=self._address)]
        settings._timeout = options.timeout  # pyright: ignore[reportAttributeAccessIssue]
        settings._threads = 2
        addresses = _Addresses()

        make = partial(_make_gloo, cls, addresses, options.rank, options.size, settings)
        self._options, self._addresses, self._engine = options, addresses, Future[Engine]()
        threading.Thread(target=self._make, args=(make,), name="dure-gloo", daemon=True).start()

    def _make(self, make: Callable[[], Engine]) -> None:
        try:
            self._engine.set_result(_connect("gloo", make, self._options))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they keep Gloo's device and its sockets
            self._engine.set_exception(error)
            if not self._addresses.own.done():
                self._addresses.own.set_exception(error)
        finally:
            del make

    @property
    def offer(self) -> bytes:
        """See `Opening.offer`: this rank's address."""
        return self._addresses.own.result()

    def connect(self, offers: Sequence[bytes]) -> None:
        """See `Opening.connect`.

        A rank that calls after the others have given up does not connect: Gloo would end its
        process and theirs.
        """
        if not self._options.store.check([_UNCONNECTED]):
            self._addresses.all.set_result(offers)

    def complete(self) -> EngineGroup:
        """See `Opening.complete`.

        Raises:
            CommError: A rank could not be connected to.
        """
        options, late = self._options, time.monotonic() + self._options.timeout.total_seconds()
        while not wait([self._engine], _LOOK_S).done:
            # `check` also raises if a member has died.
            if options.store.check([_UNCONNECTED]) or time.monotonic() > late:
                raise self._unconnected(None)
        if (error := self._engine.exception()) is not None:
            time.sleep(_LOOK_S)  # connections close before a process counts as ended
            options.store.check([_ADDRESS])
            raise self._unconnected(error)
        engine, self._engine = self._engine.result(), Future()  # the backend's alone from now on
        if options.op_timeout is not None:
            engine._set_default_timeout(options.op_timeout)
        return EngineGroup(_Gloo(engine, options), options)

    def _unconnected(self, error: BaseException | None) -> BaseException:
        """Return the error for ranks that could not connect.

        Args:
            error: The engine's error. None if another rank has failed, or time is up: then the
                connecting thread continues until Gloo has tried five times.
        """
        options, took_s = self._options, time.monotonic() - self._began
        options.store.set(_UNCONNECTED, "")
        found = find_unconnected(options, self._address)
        if not found.unreachable and error is not None and not isinstance(error, _OF_A_PEER):
            return error
        where: dict[str, Any] = {
            "group": options.name,
            "rank": options.rank,
            "world_size": options.size,
            "elapsed_s": took_s,
        }
        if found.unreachable:
            peer = found.unreachable[0].rank
            return CommError(
                "no connection between two hosts",
                peer=found.seeker if peer == options.rank else peer,
                seen=f"from {found.where} to " + "; ".join(map(str, found.unreachable)),
                fix="Let TCP through between all hosts of the job, in both directions and at all "
                "ports above 1023, or choose another interface (GLOO_SOCKET_IFNAME): see "
                "docs/hosts.md.",
                **where,
            )
        if isinstance(error, PeerLost) and took_s < options.timeout.total_seconds():
            if not found.absent:
                return error
            peer = found.absent[0]
            return PeerLost(f"rank {peer} was lost", peer=peer, seen=error.seen, **where)
        what = "not all ranks connected in time"
        if found.late:
            what = "this rank connected too late: the others had given up"
        return CommTimeout(
            what,
            missing=(options.rank,) if found.late else found.absent,
            seen=f"missing {list(found.absent)}" if found.absent else "",
            fix="See what the ranks that are late do, or raise the group's timeout.",
            **where,
        )

    def withdraw(self) -> None:
        """See `Opening.withdraw`."""
        self._addresses.all.cancel()


def _make_gloo(cls: Any, addresses: _Addresses, rank: int, size: int, settings: object) -> Engine:
    engine = cls(addresses, rank, size, settings)
    # A rank that is connected may end at once, which would be a failure to one that is not yet.
    engine.barrier().wait()
    return engine


def create_gloo(options: BackendOptions) -> EngineGroup:
    """Make this rank's part of a Gloo group by itself; every rank must do so.

    Raises:
        UsageError: Torch was built without Gloo.
        CommError: A rank did not call, or could not be connected to.
    """
    opening = GlooOpening(options)
    try:
        opening.connect(options.tell_all(_ADDRESS, opening.offer))
        return opening.complete()
    except BaseException:
        opening.withdraw()
        raise


def _longer(timeout: timedelta, margin: timedelta) -> timedelta:
    return timeout if timeout > timedelta.max - margin else timeout + margin


def create_nccl(options: BackendOptions) -> EngineGroup:
    """Make this rank's part of an NCCL group; every rank must do so.

    The current device stays as it is. NCCL uses the device of the tensors that it is passed.

    Raises:
        UsageError: Torch has no NCCL (a CPU build), or there is no CUDA device.
        CommError: A rank did not call, or could not be connected to.
    """
    cls: Any = ProcessGroupNCCL
    if cls is None or not torch.cuda.is_available():
        why = "this torch was built without NCCL" if cls is None else "there is no CUDA device"
        raise UsageError(
            "the nccl backend cannot run here", seen=why, fix="Use shm or gloo for CPU tensors."
        )
    given = options.pg_options
    settings = given if isinstance(given, cls.Options) else cls.Options()
    handling = env.text(_ERROR_HANDLING)
    if handling in (None, _END_PROCESS):  # else the program's choice
        env.put(_ERROR_HANDLING, _ABORT_ONLY)
    try:
        return connect_nccl(cls, settings, options, "nccl", "cuda", _WATCHDOG_MARGIN)
    finally:
        env.put(_ERROR_HANDLING, handling)


def connect_nccl(
    cls: Any,
    settings: Any,
    options: BackendOptions,
    name: str,
    device_type: str,
    margin: timedelta = timedelta(0),
) -> EngineGroup:
    """Make a group of torch's class for NCCL, or of another class with its methods.

    Args:
        cls: `ProcessGroupNCCL`, or the simulated accelerator's.
        settings: Its options.
        options: Of the group.
        name: Of the backend.
        device_type: The devices whose tensors it takes.
        margin: How much longer than the group's timeout the engine waits by itself.

    Raises:
        CommError: A rank did not call, or could not be connected to.
    """
    settings._timeout = _longer(options.timeout, margin)
    store = _StoreBridge(options.store)
    make = lambda: cls(store, options.rank, options.size, settings)  # noqa: E731
    engine = _connect(name, make, options)
    calls = _Nccl(engine, name, device_type, options, store, margin, settings)
    return EngineGroup(calls, options)


def _connect(name: str, make: Callable[[], Engine], options: BackendOptions) -> Engine:
    began = time.monotonic()
    try:
        return make()
    except DureError:
        raise
    except RuntimeError as e:
        raise EngineState(options).translate(e, f"create {name}", began) from e


def _own_address(options: BackendOptions) -> str:
    """Return the address at which peers reach this rank: loopback if all are on this host."""
    if chosen := chosen_address("GLOO_SOCKET_IFNAME"):
        return chosen
    return "127.0.0.1" if len({*options.hosts}) == 1 else outward_address(options.store)
