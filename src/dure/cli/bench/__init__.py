"""The benchmark: how fast collectives are on this machine, checked, and beside rivals."""
