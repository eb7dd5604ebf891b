"""The benchmark: how fast collectives are on this machine, checked, beside rivals in the same run.

`command` is the command line and `plan` what was asked, with how bytes are counted. `measure` takes
the samples from `group`s of ranks, each of which runs `rank`; `results` is what came out, and
`table` and `plot` show it.
"""
