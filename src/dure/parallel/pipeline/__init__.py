"""Pipelines: a model cut into stages, whose ranks work on different microbatches at the same time.

One step, in the order of the files: `schedules.py` (torch's classes; cuts a batch, has the list of
actions), `executor.py` (carries it out), `stage.py` (forward and backward of a part), `messages.py`
and `slots.py` (hand over), `failures.py` (stages that raise). `exported.py` cuts a model by
torch.export.
"""
