"""Process groups, collectives and messages.

`world` finds the current group; `init` and `subgroups` create groups through `creation`; `group` is
the class; `collectives`, `point_to_point`, `objects` and `queries` are the public functions;
`backends` are the engines behind one interface.

Internal: its public names are those of `dure` and of `dure.comm.functional`.
"""
