"""What the user of a job sees, and what is kept of it.

`terminal` and `output` (whose line is whose), `folding` (what ranks write alike), `live` (a row a
rank), `summary` (who failed, and where the others were), `logs` (files by round and rank).
"""
