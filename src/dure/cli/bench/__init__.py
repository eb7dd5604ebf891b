"""The benchmark: how fast collectives are on this machine, with checked results."""
