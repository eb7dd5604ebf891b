"""The drill of random kills: running jobs whose processes are killed repeatedly.

    make drill KILLS=500          or: python -m drills --kills 500 [--seed N]

A *job* is one or more agents (`dure run`, each as one host) that run a program of `programs` in a
separate folder. Everything follows from the job's seed: its kind, and which processes are killed,
stopped or asked to end, and when. `plans` draws this, and computes how the job must end. `jobs`
starts a job and checks its exit codes, the files of its ranks, and that nothing remains; `acts`
kills processes; `__main__` counts kills and prints the table.
"""
