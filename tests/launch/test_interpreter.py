"""Options of the launcher's interpreter that its ranks get as well."""

import os
import subprocess
import sys


def test_options_that_say_how_code_runs_are_handed_on_and_no_others() -> None:
    told = "from dure.launch.interpreter import interpreter_options as o; print(*o())"
    options = ["-BOO", "-s", "-q", "-X", "utf8=1", "-Wignore::UserWarning"]
    plain = {name: word for name, word in os.environ.items() if not name.startswith("PYTHON")}
    words = [sys.executable, *options, "-c", told]
    done = subprocess.run(words, env=plain, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(
        ["-B", "-OO", "-q", "-Wignore::UserWarning", "-X", "utf8=1"]
    )
