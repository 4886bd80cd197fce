"""From a fresh checkout to an answer: python3 tools/quickstart.py [PROMPT] [OPTIONS]

Makes .venv (once), installs Paceline and what it needs, and answers PROMPT with the default model
in 200 MiB, well under the model's size. OPTIONS are those of `paceline generate`, for example
--memory 300MiB, --max-tokens 64, --model DIRECTORY.
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

PROMPT = "Explain in three sentences why the sky is blue."
MEMORY = "200MiB"


def generate_arguments(given: list[str]) -> list[str]:
    """Arguments of `paceline generate`: the prompt, if given, stands first; else ours does."""
    has_prompt = bool(given) and (given[0] == "-" or not given[0].startswith("-"))
    prompt, options = (given[0], given[1:]) if has_prompt else (PROMPT, given)
    named = {option.partition("=")[0] for option in options}
    memory = [] if "--memory" in named else ["--memory", MEMORY]
    return ["generate", prompt, *memory, *options]


def main(given: list[str]) -> None:
    """Set up, then become `paceline generate`."""
    if given[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    environment = Environment()
    environment.ensure()
    environment.execute("paceline", generate_arguments(given))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
