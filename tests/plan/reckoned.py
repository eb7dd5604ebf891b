"""A job that is small enough to be reckoned on paper, and prices of nothing."""

from dure.plan.constants import Constants, described

# A machine of 1 TFLOP/s, 100 GB/s of memory, 10 GB/s of links, 1 GB/s of network; one layer of
# width 100 without a gate, 1000 tokens.
FLAGS = (
    *("gated", "is_h100", "efa", "zero", "sp", "recompute", "selective", "fp8", "newest"),
    *("compiled", "overlapped", "balanced", "regathers", "bucketed", "once", "shared"),
)


JOB = dict.fromkeys(FLAGS, 0.0) | {
    "layers": 1,
    "width": 100,
    "hidden": 400,
    "kv_width": 100,
    "heads": 10,
    "vocab": 1000,
    "seq": 1000,
    "tied": 1,
    "peak": 1e12,
    "hbm": 1e11,
    "link": 1e10,
    "net": 1e9,
    "node_size": 4,
    "power": 1,
    "dp": 1,
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "shard": 1,
    "parts": 1,
    "microbatch": 1,
    "microbatches": 1,
    "param_bytes": 2,
    "master_bytes": 4,
    "grad_bytes": 4,
    "fused": 1,
    "split": 1,
}


# Nothing costs anything; what a test is about is then given a price.
FREE = Constants(dict.fromkeys(described(), 0.0))


FREE = FREE.replaced(dict.fromkeys(("gemm_a100", "flash_a100", "link", "net", "room"), 1.0))
