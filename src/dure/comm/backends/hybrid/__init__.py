"""Shared memory within a host, another engine between hosts."""
