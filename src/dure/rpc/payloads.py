"""The values of an agent's messages: arguments, results and gradients, packed and unpacked.

A message's values are packed by the codec (`message`). This file adds the parts that need to know
the two processes: on which devices tensors belong, and where tensors enter a distributed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import RpcError, UsageError
from dure.rpc.message import Codec, Packed, name_of
from dure.rpc.rref import RRef
from dure.rpc.tensors import rebuild

if TYPE_CHECKING:
    from dure.rpc.agent import Agent
    from dure.rpc.envelope import Envelope, Received
    from dure.rpc.names import WorkerInfo

__all__ = ["NOTHING", "Args", "Function", "Kwargs", "Payloads", "not_callable"]

Function = Callable[..., Any]
Args = Sequence[Any] | None
Kwargs = dict[str, Any] | None

NOTHING = Packed()


class Payloads:
    """Packs and unpacks the values of one agent's messages.

    Args:
        agent: The process's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._codec = Codec(RRef, agent.values.not_sent, agent.allow)
        self.find_function = self._codec.find_function

    def pack_call(self, function: Function, args: Args, kwargs: Kwargs, to: WorkerInfo) -> Packed:
        """Pack a function and its arguments.

        Raises:
            UsageError: They are of the wrong types.
            RpcError: They cannot be sent.
        """
        if type(function) is not FunctionType and not callable(function):
            raise not_callable(function)
        if args is None:
            args = ()
        elif type(args) is not tuple:
            args = _check_arguments(args, kwargs)
        if kwargs is not None and type(kwargs) is not dict:
            _check_arguments(args, kwargs)
        device_there = partial(self._device_there, to)
        name = "" if kwargs else name_of(function)
        if name:
            return self._codec.pack(args, to.id, name, device_there)
        return self._codec.pack((function, args, kwargs or {}), to.id, "", device_there)

    def pack_result(self, call: Envelope, result: Any) -> Packed:
        """Pack the result of a call."""
        if result is None:
            return NOTHING
        device_back = partial(self._device_back, call)
        return self._codec.pack((result,), call.sender, "", device_back)

    def pack_gradients(self, values: tuple[Any, ...], to: WorkerInfo) -> Packed:
        """Pack the values of a message of a backward pass."""
        return self._codec.pack(values, to.id, "", partial(self._device_there, to))

    def unpack(self, received: Received) -> Any:
        """Return the values of a message, its tensors with their places in the graph.

        Raises:
            RpcError: They name a function or class that is unknown here, or is not allowed.
            Exception: Raised by unpickling.
        """
        envelope = received.envelope
        body = envelope.body
        if not (body.pickled or body.inline or body.tensors or body.references):
            return ()
        tensors: list[torch.Tensor] = []
        if body.tensors or body.inline:
            tensors = rebuild(body.tensors, body.inline, received.memories)
            gradients = self._agent.gradients
            if envelope.gradients is not None and gradients is not None:
                tensors = gradients.receiving(envelope.sender, envelope.gradients, tensors)
        try:
            return self._codec.unpack(body, tensors, received.references)
        except (AttributeError, ImportError) as error:
            raise unknown(error) from error

    def devices_back(self, to: WorkerInfo) -> dict[str, str] | None:
        """Return where tensors of a callee's devices belong here: the inverse of our device map."""
        device_map = self._agent.device_maps.get(to.name)
        return {str(b): str(a) for a, b in device_map.items()} if device_map else None

    def _device_there(self, to: WorkerInfo, device: torch.device) -> str:
        device_map = self._agent.device_maps.get(to.name, {})
        if device not in device_map:
            raise ValueError(
                f"a tensor on {device}, and there is no device map from there to {to.name}: "
                "set one with TensorPipeRpcBackendOptions.set_device_map"
            )
        return str(device_map[device])

    def _device_back(self, call: Envelope, device: torch.device) -> str:
        """Return where a result belongs: by the inverse of the caller's map, else by our own."""
        there = (call.devices or {}).get(str(device))
        return there or self._device_there(self._agent.info(call.sender), device)


def _check_arguments(args: Any, kwargs: Any) -> tuple[Any, ...]:
    if isinstance(args, Sequence) and (kwargs is None or isinstance(kwargs, dict)):
        return tuple(args)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise UsageError(
        "args must be a tuple or list, and kwargs a dict",
        op="rpc",
        seen=f"args={args!r}, kwargs={kwargs!r}",
        fix='Write args=(x,) for one argument, kwargs={"name": x}.',
    )


def not_callable(function: object) -> UsageError:
    """Return the error about a function that is none."""
    return UsageError("function should be callable", op="rpc", seen=repr(function))


def unknown(error: Exception) -> RpcError:
    """Return the error about a name that this process cannot import."""
    return RpcError(
        "a function or class of a message is not known here",
        seen=str(error),
        fix="The RPC pickler does not serialize code: define it, under the same name, in "
        "a module that both have.",
    )
