"""Foreign engines (Gloo, NCCL) as backends: see `torch_engine`."""
