"""The whole test suite, from a fresh checkout: python3 tools/test.py [PYTEST ARGUMENTS]

Makes .venv (once) with the test and development tools, and runs pytest in the repository, on all
cores up to four, with the arguments given: for example tests/routing -x, -m long, or -n 0 for one
process. The exit status is pytest's.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while modules load is no traceback either; guarded() takes over when they have.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Started by path, imports begin at the repository, not at tools/.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from tools.environment import Environment, guarded

EXTRAS = ("dev", "test")
PARALLEL = ("-n", "auto", "--maxprocesses", "4")
"""A process takes some 600 MB."""


def main(given: list[str]) -> None:
    """Set up, then become pytest."""
    environment = Environment()
    environment.ensure(EXTRAS)
    os.chdir(environment.root)
    environment.execute("python", ["-m", "pytest", *PARALLEL, *given])


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
