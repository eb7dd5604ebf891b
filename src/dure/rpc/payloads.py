"""The values in an agent's messages: arguments, results and gradients, packed and unpacked.

The codec (`codec`) packs values. This file adds the parts that depend on the two processes: to
which devices tensors are moved, and where tensors enter a distributed graph.

Values that were not packed by this file are an `RpcError` that names their sender
(`failures.malformed_message`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import RpcError, UsageError
from dure.rpc.codec import Codec, Packed, insert, name_of
from dure.rpc.failures import malformed_message
from dure.rpc.rref import RRef
from dure.rpc.tensors import rebuild

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent
    from dure.rpc.message import Received, RpcMessage
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

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._codec = Codec(RRef, agent.values.not_sent, agent.allow)

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

    def pack_result(self, call: RpcMessage, result: Any) -> Packed:
        """Pack the result of a call."""
        if result is None:
            return NOTHING
        device_back = partial(self._device_back, call)
        return self._codec.pack((result,), call.sender, "", device_back)

    def pack_gradients(self, values: tuple[Any, ...], to: WorkerInfo) -> Packed:
        """Pack the gradients of a message of a backward pass."""
        return self._codec.pack(values, to.id, "", partial(self._device_there, to))

    def unpack(self, received: Received) -> Sequence[Any]:
        """Return the values of a message, with their tensors as part of the distributed graph.

        Raises:
            RpcError: They name a function or class that is unknown here or not allowed, or were
                not packed by RPC.
            Exception: Raised by unpickling.
        """
        message = received.message
        body = message.body
        if not (body.pickled or body.inline or body.tensors or body.references):
            return ()
        tensors: list[torch.Tensor] = []
        loading = False
        try:
            if body.tensors or body.inline:
                tensors = rebuild(body.tensors, body.inline, received.memories)
                if message.gradients is not None:
                    gradients = self._agent.gradients
                    tensors = gradients.receiving(message.sender, message.gradients, tensors)
            loading = True
            values = self._codec.load(body, tensors, received.references)
            loading = False
            return insert(values, body, tensors, received.references)
        except RpcError:
            raise
        except (pickle.UnpicklingError, EOFError) as error:
            raise malformed_message(message.sender, error) from error
        except Exception as error:
            if not loading:
                raise malformed_message(message.sender, error) from error
            if isinstance(error, AttributeError | ImportError):
                raise _unknown(error) from error
            raise

    def unpack_call(self, received: Received) -> tuple[Function, Sequence[Any], dict[str, Any]]:
        """Return the function, arguments and keyword arguments of a call; errors as `unpack`."""
        values, name = self.unpack(received), received.message.body.function
        if not name:
            if len(values) == 3 and callable(values[0]) and type(values[2]) is dict:
                return values[0], values[1], values[2]
            error = TypeError("a call without a function, arguments and keyword arguments")
            raise malformed_message(received.message.sender, error)
        try:
            return self._codec.find_function(name), values, {}
        except (AttributeError, ImportError) as error:
            raise _unknown(error) from error

    def devices_back(self, to: WorkerInfo) -> dict[str, str] | None:
        """Return for each device of a callee the device here: the inverse of our device map."""
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

    def _device_back(self, call: RpcMessage, device: torch.device) -> str:
        """Return the device of a result: by the inverse of the caller's map, else by ours."""
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
    """Return the error about a function that is not callable."""
    return UsageError("function should be callable", op="rpc", seen=repr(function))


def _unknown(error: Exception) -> RpcError:
    """Return the error about a name that this process cannot import."""
    return RpcError(
        "a function or class of a message is not known here",
        seen=str(error),
        fix="The RPC pickler does not serialize code: define it, under the same name, in "
        "a module that both have.",
    )
