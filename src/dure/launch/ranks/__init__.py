"""A rank's process from both sides: what it finds, how it starts, and who ends it.

`spawn` and `child` (its two ends), `zygote`, `forking` and `imports` (ranks forked from a process
that has imported torch), `environment`, `cores`, `limits` and `ports` (what a rank finds, and where
it runs), `report` and `errorfiles` (what it reports of its end), `processes` and `reaper` (what
belongs to a job, and who ends it when the launcher cannot).
"""
