"""Distributed autograd as programs use it: over calls, references and workers."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
import torch

from dure import autograd
from dure.errors import RpcError
from dure.rpc import api
from dure.rpc.autograd.backward import Contexts
from dure.rpc.optimizer import DistributedOptimizer
from dure.rpc.rref import RRef
from tests.rpc.gates import Cluster, Gate, wait_at_gate
from tests.waiting import until


def contexts(cluster: Cluster, id: int) -> Contexts:
    found = cluster.agents[id].gradients
    assert isinstance(found, Contexts)
    return found


def all_released(cluster: Cluster) -> None:
    """Wait until no living worker knows a context."""
    until(
        lambda: all(contexts(cluster, id).counts == (0, 0) for id in cluster.network.transports),
        "contexts to be released",
    )


# --- what runs at the workers ---------------------------------------------------------------


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def multiply_by(rref: RRef[torch.Tensor], other: torch.Tensor) -> torch.Tensor:
    return rref.local_value() * other


def through(path: list[str], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute sin(a*b) at the end of the path, and add a*b of each worker on the way."""
    if not path:
        return (a * b).sin()
    return api.rpc_sync(path[0], through, (path[1:], a, b)) + a * b


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def known() -> set[int]:
    return autograd._current_context().workers  # pyright: ignore[reportPrivateUsage]


def gradient_of(rref: RRef[torch.Tensor], context_id: int) -> list[float]:
    return autograd.get_gradients(context_id)[rref.local_value()].tolist()


def count(values: list[torch.Tensor]) -> int:
    return len(values)


# --- calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async", "remote"])
def test_a_call_in_a_context(cluster: Cluster, way: str) -> None:
    a, b = leaf(2.0, 3.0), leaf(5.0, 7.0)
    with cluster.on(0), autograd.context() as context_id:
        if way == "sync":
            result = api.rpc_sync("worker1", multiply, (a, b))
        elif way == "async":
            result = api.rpc_async("worker1", multiply, (a, b)).wait()
        else:
            result = api.remote("worker1", multiply, (a, b)).to_here()
        autograd.backward(context_id, [result.sum()])
        found = autograd.get_gradients(context_id)
        assert {t: g.tolist() for t, g in found.items()} == {a: [5.0, 7.0], b: [2.0, 3.0]}
        assert (a.grad, b.grad) == (None, None)
        assert autograd._current_context().workers == {1}  # pyright: ignore[reportPrivateUsage]
    all_released(cluster)


@pytest.mark.parametrize("seed", range(3))
def test_nested_calls_with_messages_that_overtake_each_other(seed: int) -> None:
    with Cluster(4, Random(seed)) as cluster:
        a, b = leaf(2.0, 3.0), leaf(5.0, 7.0)
        path = ["worker1", "worker2", "worker0", "worker1", "worker3"]
        with cluster.on(0), autograd.context() as context_id:
            autograd.backward(context_id, [through(path, a, b).sum()])
            found = autograd.get_gradients(context_id)
        twins = [t.detach().clone().requires_grad_() for t in (a, b)]
        product = twins[0] * twins[1]
        (product.sin() + 5 * product).sum().backward()
        torch.testing.assert_close([found[a], found[b]], [t.grad for t in twins])
        all_released(cluster)


def test_a_reference_to_a_parameter_gets_its_gradient_at_its_owner(cluster: Cluster) -> None:
    with cluster.on(0):
        weight = api.remote("worker1", leaf, (5.0,))
        with autograd.context() as context_id:
            result = api.rpc_sync("worker1", multiply_by, (weight, leaf(3.0)))
            autograd.backward(context_id, [result.sum()])
            assert api.rpc_sync("worker1", gradient_of, (weight, context_id)) == [3.0]
            copy = weight.to_here()
            autograd.backward(context_id, [(copy * 4).sum()])
            assert api.rpc_sync("worker1", gradient_of, (weight, context_id)) == [7.0]


def fetching(cluster: Cluster, rref: RRef[torch.Tensor]) -> tuple[threading.Thread, list[Any]]:
    """Start to fetch a value at worker 0, in a thread that is in no context."""
    fetched: list[torch.Tensor] = []

    def fetch() -> None:
        with cluster.on(0):
            fetched.append(rref.to_here())

    thread = threading.Thread(target=fetch)
    thread.start()
    return thread, fetched


def test_a_fetch_outside_of_contexts_is_not_of_the_one_in_which_the_value_is_made(
    cluster: Cluster,
) -> None:
    with cluster.on(0), autograd.context():
        rref = api.remote("worker1", wait_at_gate, (leaf(1.0),))
        Gate.wait_for()
        thread, fetched = fetching(cluster, rref)
        entry = cluster.agents[1].values._values[rref._ref]  # pyright: ignore[reportPrivateUsage]
        until(lambda: entry.watchers, "the fetch")
        Gate.open.set()
        thread.join()
        assert (fetched[0].tolist(), fetched[0].grad_fn) == ([1.0], None)


def test_a_fetch_outside_of_contexts_is_not_of_the_one_of_the_thread_that_receives_it(
    cluster: Cluster,
) -> None:
    with cluster.on(0):
        rref = api.remote("worker1", leaf, (1.0,))
        assert rref.to_here().tolist() == [1.0]  # it is made
    cluster.network.hold(0, 1)
    thread, fetched = fetching(cluster, rref)
    held = cluster.network._held[0, 1]  # pyright: ignore[reportPrivateUsage]
    until(lambda: held, "the fetch")
    with cluster.on(1), autograd.context():
        for _, deliver in held:
            assert deliver() is None  # this thread answers
        held.clear()
    thread.join()
    assert (fetched[0].tolist(), fetched[0].grad_fn) == ([1.0], None)


def test_outside_of_contexts_nothing_is_noted(cluster: Cluster) -> None:
    with cluster.on(0):
        assert api.rpc_sync("worker1", multiply, (leaf(2.0), leaf(3.0))).tolist() == [6.0]
        with pytest.raises(RpcError, match="doesn't have a valid autograd context"):
            autograd._current_context()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(RpcError, match="doesn't have a valid autograd context"):
            api.rpc_sync("worker1", known)
    all_released(cluster)


def test_a_loss_that_is_a_reference(cluster: Cluster) -> None:
    a = leaf(2.0)
    with cluster.on(0):
        with autograd.context() as context_id:
            loss = api.remote("worker1", multiply, (a, a))
            loss.backward(context_id)
            assert autograd.get_gradients(context_id)[a].tolist() == [4.0]
        mine = RRef((a * 3).sum())
        mine.backward()
        assert a.grad is not None
        assert a.grad.tolist() == [3.0]
        with pytest.raises(RpcError, match="should contain a tensor"):
            RRef("no tensor").backward()
        with pytest.raises(RpcError, match="require 'dist_autograd_ctx_id'"):
            api.remote("worker1", count, ([],)).backward()


def change_in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.mul_(2.0)
    return x.add_(1.0)


def test_what_came_may_be_changed_in_place(cluster: Cluster) -> None:
    a = leaf(1.0, 2.0)
    with cluster.on(0), autograd.context() as context_id:
        result = api.rpc_sync("worker1", change_in_place, (a,))
        result.mul_(3.0)
        autograd.backward(context_id, [result.sum()])
        assert result.tolist() == [9.0, 15.0]
        assert autograd.get_gradients(context_id)[a].tolist() == [6.0, 6.0]


# --- errors ----------------------------------------------------------------------------------


def test_losses_that_are_none(cluster: Cluster) -> None:
    with cluster.on(0), autograd.context() as context_id:
        for roots, text in [
            ([], "No tensors provided for gradient computation"),
            ([torch.ones(1)], "requires_grad not set on"),
            ([leaf(1.0, 2.0) * 1], "is not a scalar, all roots need to be scalar"),
            ([leaf(1.0)], "does not have a valid gradient function"),
        ]:
            with pytest.raises(RpcError, match=text):
                autograd.backward(context_id, roots)
        nothing: Any = None
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.backward(context_id, nothing)
        with pytest.raises(RpcError, match="Could not find autograd context with id: 100"):
            autograd.backward(100, [leaf(1.0).sum()])


def test_a_bool_is_not_a_context(cluster: Cluster) -> None:
    with cluster.on(0), autograd.context() as context_id:
        assert context_id == int(True)
        for call in (
            lambda: autograd.backward(True, [leaf(1.0).sum()]),
            lambda: autograd.get_gradients(True),
            lambda: DistributedOptimizer(torch.optim.SGD, []).step(True),
        ):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call()


def test_contexts_do_not_nest_and_have_the_numbers_of_their_process(cluster: Cluster) -> None:
    with cluster.on(3):
        with autograd.context() as context_id:
            assert context_id >> 48 == 3
            assert context_id <= autograd._get_max_id()  # pyright: ignore[reportPrivateUsage]
            assert autograd._get_max_id() >> 48 == 3  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(RpcError, match="Already have an autograd context id"):
                autograd.context().__enter__()
            autograd._is_valid_context(context_id)  # pyright: ignore[reportPrivateUsage]
            assert autograd._get_debug_info()["num_autograd_contexts"] == 1  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(
            RpcError, match=f"Could not find autograd context with id: {context_id}"
        ):
            autograd._retrieve_context(context_id)  # pyright: ignore[reportPrivateUsage]


def _leave(_: torch.Tensor) -> None:
    raise SystemExit(3)


def leaves_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(_leave)
    return y


def test_an_exit_in_another_workers_backward_is_an_error_of_the_pass(cluster: Cluster) -> None:
    with cluster.on(0), autograd.context() as context_id:
        loss = api.rpc_sync("worker1", leaves_backward, (leaf(2.0),)).sum()
        with pytest.raises(RpcError, match="SystemExit"):
            autograd.backward(context_id, [loss])


def test_a_shutdown_ends_a_backward_pass(cluster: Cluster) -> None:
    with cluster.on(0) as agent, autograd.context() as context_id:
        x = leaf(2.0)
        y = api.rpc_sync("worker1", multiply, (x, x))
        cluster.network.hold(1, 0)

        def close() -> None:
            until(lambda: contexts(cluster, 0).counts[1] == 1, "the pass")
            agent.close()

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(RpcError, match="shut down during this backward pass"):
            autograd.backward(context_id, [y.sum()])
        closing.join()
