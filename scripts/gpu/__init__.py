"""The checks of `scripts/gpu-check`."""
