"""The process of one arm: `python -m tools.bench.arm FOLDER`, talked to by workers.py.

FOLDER is the memory group to join, or "-". Joining comes before anything heavy is imported, so
that all of the arm's memory is counted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.groups import join

if TYPE_CHECKING:
    from tools.bench.protocol import Conversation, Job


def main() -> None:
    """Join the group, hear what to be, and be it."""
    # A shell may have had it ignored; the benchmark interrupts an arm that it no longer waits for.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] != "-":
        join(Path(sys.argv[1]))
    # Replies have standard output to themselves: whatever a library prints goes to the other.
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    from tools.bench.protocol import Conversation, Job

    conversation = Conversation(sys.stdin.buffer, said)
    job = conversation.hear(Job)
    if job is not None:
        _serve(job, conversation)


def _serve(job: Job, conversation: Conversation) -> None:
    from routing.errors import UsageError
    from tools.bench.protocol import Failed

    try:
        whose = job.kind.split("_")[0]
        name = f"{whose}_arm" if whose in ("transformers", "llamacpp") else "our_arm"
        arm = importlib.import_module(f"tools.bench.{name}")
        (arm.run_baseline if job.baseline else arm.serve)(job, conversation)
    except Exception as error:
        message = str(error) or type(error).__name__
        if not isinstance(error, UsageError):
            message = f"{type(error).__name__}: {message}"
        conversation.say(Failed(message, isinstance(error, UsageError)))


if __name__ == "__main__":
    main()
