"""`python -m dure.run` is `dure run`, as `python -m torch.distributed.run` is torchrun."""

from dure.cli import main

if __name__ == "__main__":
    main("run")
