"""The demo: train on real images with one rank and with several, compare, report.

`command` is the command line; `train` the program every rank runs, an ordinary one; `events` what
the ranks tell; `results` what it amounts to; `report` shows it as a page.
"""
