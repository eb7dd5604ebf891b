"""The program of a spawned rank (`dure.launch.functions`).

It is a folder of its own, so that nothing beside it hides a module that other code looks for. It
imports nothing of Dure until the rank has the caller's search path.
"""

import pickle
import sys

if __name__ == "__main__":
    call, *results = sys.argv[1:]
    with open(call, "rb") as file:
        sys.path[:], argv, key = pickle.load(file)
        from dure.launch import functions

        functions.call_function(file, argv, key, results)
