"""Set-up, test and benchmark commands of the repository. They are never shipped.

Everything here needs what Paceline needs. This file says so in one line, and is written so that an
old Python can still read it (as are the commands that are started by path).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (not outdated: it is what old Pythons get to read)
    sys.exit(
        f"Paceline needs Python 3.11 or newer; {sys.executable} is Python"
        f" {sys.version_info[0]}.{sys.version_info[1]}."
        " Run the same command with a newer one, for example python3.12."
    )
if sys.platform == "win32":
    sys.exit("Paceline runs on Linux and macOS; on Windows, run it inside WSL.")
