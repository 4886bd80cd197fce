"""What every test starts from: the same seeds, one thread, and nothing of its user's surroundings.

No settings, no network, and a terminal of one width and no colours, whatever pytest was started in.

Torch is not imported here, since most of routing's and tools' tests do without it; its thread count
comes from the environment, which processes started by a test inherit.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

THREADS = 1
COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(THREADS)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "80"
for name in (*COLOURS, "GITHUB_ACTIONS"):  # what makes rich and typer write colours into pipes
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("PACELINE_")]:
    if name != "PACELINE_CACHE":  # the default model may be there already
        del os.environ[name]

# The machines that run this are shared and slow by turns, so no example has a deadline of its own,
# nor has the drawing of it: the test as a whole has one. In CI the same examples come each time.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Seed what draws random numbers, and undo what an earlier test did to torch's threads."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(0)
        torch.set_num_threads(THREADS)
