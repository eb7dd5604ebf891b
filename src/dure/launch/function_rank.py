"""The program of a spawned rank (`dure.launch.functions`): run, and imported by no module.

What a rank is forked from may have imported `functions`, and Python warns when a module that is
imported already is run.
"""

from dure.launch import functions

if __name__ == "__main__":
    functions.main()
