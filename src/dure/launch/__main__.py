"""`python -m dure.launch` is `dure run`, which lies a layer above: so it is run, not imported."""

import runpy

if __name__ == "__main__":
    runpy.run_module("dure.run", run_name="__main__")
