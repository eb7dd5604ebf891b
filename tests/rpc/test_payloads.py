"""Messages that no worker of Dure sends: one typed error, which names the sender."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest

from dure.errors import RpcError, UsageError
from dure.rpc import api, references
from dure.rpc.agent import RpcAgent
from dure.rpc.codec import Body, Codec
from dure.rpc.message import MessageType, RpcMessage
from dure.rpc.references import Token
from dure.rpc.rref import RRef
from dure.rpc.tensors import TensorRow
from tests.rpc.gates import Cluster, Gate, add, wait_at_gate
from tests.waiting import until

NESTED = Codec().pack(([],)).body.tensor_at
VALUE = pickle.dumps((5,), 5)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageType.ANSWER, Body(VALUE, tensor_at=7)),
        (MessageType.ANSWER, Body(VALUE, tensor_at=0)),
        (MessageType.ANSWER, Body(VALUE, reference_at=0)),
        (MessageType.ANSWER, Body(pickle.dumps(5))),
        (MessageType.ANSWER, Body(pickle.dumps(None), tensor_at=0)),
        (MessageType.ANSWER, Body(b"junk")),
        (
            MessageType.ANSWER,
            Body(b"\x80\x05cdure.rpc.codec\n_tensor\nK\x07\x85R.", tensor_at=NESTED),
        ),
        (MessageType.ANSWER, Body(VALUE, (TensorRow(3, "float32", (1,), (1,), 0),))),
        (MessageType.ANSWER, Body(VALUE, (TensorRow(0, "no_dtype", (1,), (1,), 0),))),
        (MessageType.ANSWER, Body(VALUE, (TensorRow(0, "float32", (1,), (1, 1), 0),))),
        (MessageType.ERROR, Body(b"junk")),
        (MessageType.ERROR, Body()),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_malformed_answer_is_an_error_that_names_its_sender(
    kind: MessageType, body: Body, asynchronous: bool
) -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        (call,) = agent.calls.all()
        cluster.agents[1].transport.send(0, RpcMessage(kind, 1, call.number, body), ())
        wait = future.wait if asynchronous else partial(agent.caller.wait, call)
        with pytest.raises(RpcError, match="malformed message from worker 1") as caught:
            wait()
        assert caught.value.peer == 1
        Gate.open.set()


@pytest.mark.parametrize("values", [(), (add,), (5, (), {}), (add, (1, 2), []), "abc", None])
def test_a_malformed_call_is_an_error_that_names_its_sender(
    values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        packed = agent.payloads.pack_call(add, (1, 2), {"c": 3}, agent.directory.info(1))
        packed.body = Body(pickle.dumps(values))
        monkeypatch.setattr(agent.payloads, "pack_call", lambda *_: packed)
        with pytest.raises(RpcError, match="malformed message from worker 0"):
            api.rpc_sync("worker1", add, (1, 2))


def confirmed(agent: RpcAgent, value: RRef[Any]) -> None:
    until(lambda: not agent.values.counts[2] and value.confirmed_by_owner(), "all holds to settle")


@pytest.mark.parametrize("message", ["ValueGone", "TokenAccepted"])
def test_only_the_owner_and_the_receiver_end_a_reference(message: str) -> None:
    """Worker 2 forges messages about a reference that worker 0 has, of worker 1."""
    with Cluster(3) as cluster, cluster.on(0) as agent:
        rref = api.remote("worker1", add, (2, 3))
        confirmed(agent, rref)
        state = agent.values._references
        token: Token = state.pack(rref._ref, 1)[1]
        forged: Any = {
            "ValueGone": references.ValueGone(rref._ref),
            "TokenAccepted": references.TokenAccepted(token),
        }[message]
        assert state.heard(2, forged) == []
        assert state.has(rref._ref)
        assert state.num_unsettled == 1
        assert state.heard(1, references.TokenAccepted(token)) == []
        assert state.num_unsettled == 0
        assert rref.to_here() == 5


@pytest.mark.parametrize("seconds", [True, False])
def test_a_bool_is_not_a_timeout(seconds: bool) -> None:
    with Cluster(2) as cluster, cluster.on(0):
        kept = api.remote("worker1", add, (1, 2))
        for call in (api.rpc_sync, api.rpc_async, api.remote):
            with pytest.raises(UsageError, match="timeout must be a number of seconds"):
                call("worker1", add, (1, 2), timeout=seconds)
        with pytest.raises(UsageError, match="timeout must be a number of seconds"):
            kept.to_here(seconds)
