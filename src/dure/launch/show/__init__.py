"""What the user of a job sees, and what is kept of it.

`output` cuts what ranks write into lines, and has the place they go to; `screen` does it for bars
on a terminal. `folding` joins equal lines and makes prefixes, `terminal` puts all together, `logs`
keeps files by round and rank. `summary` says who failed, and where the others were; `watcher` is
for the page.
"""
