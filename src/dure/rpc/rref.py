"""Remote references, as programs have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc.autograd.api import backward
from dure.rpc.autograd.backward import inside
from dure.rpc.current import current
from dure.rpc.functions import MARK, DeferredResult
from dure.rpc.references import SEQUENCE_BITS

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent
    from dure.rpc.calls import PendingCall
    from dure.rpc.codec import ReferenceRow
    from dure.rpc.names import WorkerInfo
    from dure.rpc.references import RefId

__all__ = ["RRef", "RRefProxy"]

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value of one process, its owner; it may be sent to any other.

    `RRef(value)` makes this process the owner of a value; `rpc.remote` makes a value at another
    process. The owner keeps the value until no process has a reference to it.

    Args:
        value: Any object.
        type_hint: Accepted for torch; not used.

    Raises:
        RpcError: RPC has not been initialized.

    Cost:
        No message. A process that receives a reference sends up to three small messages, which
        travel with others; one when it has freed all its objects of the reference.

    Threads:
        All methods may be called from any thread.

    Example:
        ```python
        kept = RRef(torch.ones(2))
        assert kept.is_owner() and kept.local_value().sum() == 2

        def doubled(rref):
            return 2 * rref.to_here()  # a copy of the value

        assert rpc.rpc_sync(f"worker{rank}", doubled, (kept,)).tolist() == [2.0, 2.0]
        other = rpc.remote(f"worker{1 - rank}", list, ((3, 1, 2),))
        other.rpc_sync().sort()  # runs at the owner
        assert other.to_here() == [1, 2, 3] and other.owner_name() == f"worker{1 - rank}"
        ```
    """

    __slots__ = ("__weakref__", "_agent", "_call", "_known", "_owner", "_ref")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current()
        self._fill(agent, agent.values.begin(agent.me.id), agent.me.id)
        agent.values.set(self._ref, value)

    def _fill(self, agent: RpcAgent, ref: RefId, owner: int, known: bool = True) -> None:
        self._agent, self._ref, self._owner, self._known = agent, ref, owner, known
        self._call: PendingCall | None = None  # that makes the value

    @classmethod
    def received(cls, agent: RpcAgent, ref: RefId, owner: int, known: bool) -> RRef[Any]:
        """Return the object for a reference that `References` counts already."""
        made = cls.__new__(cls)
        made._fill(agent, ref, owner, known)
        return made

    def made_by(self, call: PendingCall) -> None:
        """Set the call that makes the value."""
        self._call = call

    def __del__(self) -> None:
        if getattr(self, "_known", False):
            self._agent.values.forget(self._ref)

    # --- the owner ---------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Return the owner.

        Returns:
            Its name and id, also if it is gone.
        """
        return self._agent.info(self._owner)

    def owner_name(self) -> str:
        """Return the owner's name.

        Returns:
            The name, also if the owner is gone.
        """
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this process is the owner.

        Returns:
            True at the owner.
        """
        return self._owner == self._agent.me.id

    def confirmed_by_owner(self) -> bool:
        """Whether the value is kept for this process.

        Returns:
            True if the owner has confirmed this process's hold, or if the process that sent the
            reference keeps its own hold until then.
        """
        return self._agent.values.is_held(self._ref)

    # --- the value ---------------------------------------------------------------------------

    def local_value(self) -> T:
        """Return the value itself, at the owner; waits until it is made.

        Returns:
            The value, not a copy.

        Raises:
            RpcError: This process is not the owner, or RPC was shut down.
            Exception: Raised by the call that was to make the value.
        """
        self._check("local_value() on it")
        if not self.is_owner():
            ids = f"rref_id={self._id(self._ref[0], -1)}, fork_id={self._id(self._agent.me.id)}"
            raise RpcError(
                f"For UserRRef({ids}), can't call localValue() on user {self._agent.me!r}. "
                f"Call it on owner {self.owner()!r}",
                fix="Or call to_here(), for a copy.",
            )
        return self._agent.values.local(self._ref)

    def to_here(self, timeout: float = -1.0) -> T:
        """Return a copy of the value, or, at the owner, the value itself; waits until it is made.

        Args:
            timeout: Seconds; -1 for the default, 0 for none.

        Returns:
            The value.

        Raises:
            PeerLost: The owner is gone.
            RpcError: The value was never made, the call timed out, or RPC was shut down.
            Exception: Raised by the call that was to make the value.

        Cost:
            One message to the owner and one back; at the owner none.
        """
        self._check("to_here() on it")
        if self.is_owner():
            return self._agent.values.local(self._ref)
        return self._agent.caller.fetch(self._ref, self.owner(), timeout)

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """Return a proxy of the value: its methods run at the owner, as by `rpc.rpc_sync`.

        Args:
            timeout: Of each call, in seconds; -1 for the default, 0 for none.

        Returns:
            A proxy whose methods return the results.
        """
        return RRefProxy(self, self._agent.rpc_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """Return a proxy of the value: its methods run at the owner, as by `rpc.rpc_async`.

        Args:
            timeout: Of each call, in seconds; -1 for the default, 0 for none.

        Returns:
            A proxy whose methods return futures.
        """
        return RRefProxy(self, self._agent.rpc_async, timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        """Return a proxy of the value: its methods run at the owner, as by `rpc.remote`.

        Args:
            timeout: Of each call, in seconds; -1 for the default, 0 for none.

        Returns:
            A proxy whose methods return references.
        """
        return RRefProxy(self, self._agent.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a loss, at its owner.

        Args:
            dist_autograd_ctx_id: The context of distributed autograd. At the owner it may be -1:
                then torch's own backward pass runs, and adds to `.grad`.
            retain_graph: Whether to keep the graph for another pass.

        Raises:
            RpcError: The value is not a tensor; the owner is another process and no context is
                given; and as `dure.autograd.backward`.
            PeerLost: The owner is gone, or a process that takes part.
        """
        self._check("backward() on it")
        sent = self, dist_autograd_ctx_id, retain_graph
        if self.is_owner():
            run_backward(*sent)
        elif dist_autograd_ctx_id < 0:
            raise RpcError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified",
                op="RRef.backward",
                fix="Pass the id of `with dure.autograd.context() as context_id:`.",
            )
        else:
            with inside(dist_autograd_ctx_id):
                self._agent.rpc_sync(self.owner(), run_backward, sent, None, 0.0)

    # --- others ------------------------------------------------------------------------------

    def pack_reference(self, to: int) -> ReferenceRow:
        """Return the row for it in a message."""
        self._check("fork an UserRRef")
        return self._agent.values.pack(self._ref, to)

    def _get_future(self) -> torch.futures.Future[None]:
        """Return a future that is done when the call that makes the value has ended."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._call is None:
            future.set_result(None)
            return future

        def ended(call: PendingCall) -> None:
            if isinstance(call.outcome, Exception):
                future.set_exception(call.outcome)
            else:
                future.set_result(None)

        self._agent.caller.when_done(self._call, ended)
        return future

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        """Return the value's type, or a future of it."""
        owner = self.owner()
        future = self._agent.rpc_async(owner, value_type, (self,), None, timeout)
        return future.wait() if blocking else future

    def _check(self, what: str) -> None:
        """Raise an error if the value is lost."""
        outcome = self._call.outcome if self._call is not None else None
        made = not isinstance(outcome, Exception)
        if made and self._known and self._agent.values.is_usable(self._ref):
            return
        if self._agent.closed:
            raise RpcError(f"Cannot call {what} after deletion", seen=repr(self))
        if (lost := self._agent.lost(self._owner)) is not None:
            raise lost
        if isinstance(outcome, PeerLost):  # of a worker that the directory has not removed yet
            raise outcome.with_traceback(None)  # or it would grow with each call
        if isinstance(outcome, Exception):
            raise RpcError(f"RRef creation via rpc.remote() failed: {outcome}") from outcome
        error = None if self._known else RpcError("this reference came with a call given up")
        error = error or self._agent.values.why_lost(self._ref, self._owner)
        if error is not None:
            raise error

    def __repr__(self) -> str:
        made = self._id(self._ref[0], -1)
        if self.is_owner():
            return f"OwnerRRef({made})"
        return f"UserRRef(RRefId = {made}, ForkId = {self._id(self._agent.me.id)})"

    def _id(self, worker: int, more: int = 0) -> str:
        number = self._ref[1] % (1 << SEQUENCE_BITS)  # without the secret part
        return f"GloballyUniqueId(created_on={worker}, local_id={number + more})"

    def __reduce__(self) -> tuple[object, ...]:
        raise RpcError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a value, at its owner."""
    method = rref._agent.method(rref.local_value(), name)  # pyright: ignore[reportPrivateUsage]
    result = method(*args, **kwargs)
    return DeferredResult(result) if hasattr(method, MARK) else result


def run_backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from a value, at its owner."""
    root = rref.local_value()
    if not isinstance(root, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()", seen=repr(type(root)))
    if context_id < 0:
        root.backward(retain_graph=retain_graph)
    else:
        backward(context_id, [root], retain_graph)


def value_type(rref: RRef[Any]) -> type:
    """Return the type of a value, at its owner."""
    return type(rref.local_value())


class RRefProxy:
    """Calls methods of a value at its owner.

    Obtained from:
        `RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote`.
    """

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = -1.0) -> None:
        self.rref, self.rpc_timeout = rref, timeout
        self._way = rpc_api

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        sent = (self.rref, name, args, kwargs)
        if self._way == self.rref._agent.remote:  # pyright: ignore[reportPrivateUsage]
            kind = self.rref._get_type(self.rpc_timeout)  # pyright: ignore[reportPrivateUsage]
            getattr(kind, name)  # raises here, because the result of the call may never be fetched
        return self._way(self.rref.owner(), call_method, sent, None, self.rpc_timeout)
