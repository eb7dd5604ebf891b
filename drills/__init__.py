"""The drill of random kills: jobs of which processes are killed, again and again, while they run.

    make drill KILLS=500          or: python -m drills --kills 500 [--seed N]

A *job* is one or more agents (`dure run`, each playing a host) with a program of `programs`, in a
folder of its own. Everything that happens to it follows from its seed: what kind of job it is, and
who is killed, stopped or asked to end when (`plans`, which also tells how such a job must end).
`jobs` starts it, and looks at how it ended, what its ranks have written, and whether anything is
left of it; `acts` kills. `__main__` counts, and prints the table.
"""
