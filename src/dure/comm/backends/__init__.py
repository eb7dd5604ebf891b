"""The engines: one file (or a few) each, behind the interface of `base`, found by `registry`."""
