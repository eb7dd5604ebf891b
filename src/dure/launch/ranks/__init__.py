"""A rank's process from both sides: its environment, its start, and its end.

`spawn` and `child` (its two ends), `zygote`, `forking` and `imports` (ranks forked from a process
that has imported torch), `environment`, `cores`, `limits` and `ports` (its variables, processors
and ports), `report` and `errorfiles` (its report of its end), `processes` and `reaper` (the
processes of a job, and the one that ends them when the launcher cannot).
"""
