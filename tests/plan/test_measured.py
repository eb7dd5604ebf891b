"""A machine from what ranks measured, by hand."""

import pytest

from dure.plan.measured import HIDDEN, TOKENS, WIDTH, machine_of

PEAK, SIDE, HBM = 1e11, 60, 2e10  # of the machine that is measured


def product(m, n, k):
    return 2 * m * n * k / PEAK * (1 + SIDE * (1 / m + 1 / n + 1 / k))


def measured(ranks):
    layer = 3 * (
        product(TOKENS, 3 * WIDTH, WIDTH)
        + product(TOKENS, WIDTH, WIDTH)
        + product(TOKENS, 2 * HIDDEN, WIDTH)
        + product(TOKENS, WIDTH, HIDDEN)
    )
    attention = 3.5 * 2 * TOKENS * TOKENS * WIDTH / (0.5 * PEAK)
    features = WIDTH + 2 * HIDDEN + 3 * WIDTH
    seen = {
        "large": product(1024, 1024, 1024),
        "small": product(128, 128, 1024),
        "stream": 3 * 4 * 2**24 / HBM,
        "attention": attention,
        "layer": layer + attention + 3 * 7 * 4 * TOKENS * features / HBM,  # seven passes
        "tiny": 3e-3,
        "tiny_forward": 1e-3,
        "loss": 9 * 4 * TOKENS * 8192 / HBM,
        "adam": 2 * 28 * 2**23 / HBM,
        "held": 3e8,
    }
    if ranks > 1:
        seen |= {"all_reduce_8": 1e-4, f"all_reduce_{2**24}": 1e-4 + 2**24 / 4e9}
        seen |= {"message_8": 2e-5, f"message_{2**24}": 2e-5 + 2**24 / 8e9}
    return seen


def test_what_a_machine_is_is_found_again():
    machine = machine_of(measured(2), 2, 1 << 34, "here")
    gpu, found = machine.gpu, machine.measured
    assert (gpu.kind, machine.ranks, gpu.gpus_per_node) == ("cpu", 2, 2)
    assert gpu.bf16_tflops * 1e12 == pytest.approx(PEAK)
    assert gpu.memory_tb_s * 1e12 == pytest.approx(HBM)
    assert gpu.link_gb_s * 1e9 == pytest.approx(4e9)  # of 2 ranks each byte crosses once
    expected = {
        "gemm_side": SIDE,
        "flash_a100": 0.5,
        "passes": 7,
        "loss_passes": 9,
        "adam": 2,
        "host": 1e-3,
        "host_backward": 2,
        "link_latency": 1e-4 / 2,
        "message": 2e-5,
        "message_bytes": 0.5,
        "context": 3e8 + 2**25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
