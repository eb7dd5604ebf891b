"""What it takes to offer a foreign engine (Gloo, NCCL) as a backend: see `torch_engine`."""
