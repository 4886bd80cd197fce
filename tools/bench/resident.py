"""`resident`: everything fits. What is left of the difference is compute and drafts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.preparation import look
from routing.errors import OptionError
from tools.bench.decode import Contest, measure_decode
from tools.bench.results import Options, Result
from tools.bench.shown import Shown
from tools.bench.sizing import sized

ARMS = ("paceline", "transformers", "transformers_assisted", "llamacpp")
RESIDENT = Contest(
    "resident",
    ARMS,
    {
        "paceline": "paceline",
        "transformers": "transformers_resident",
        "transformers_assisted": "transformers_assisted",
        "llamacpp": "llamacpp",
    },
    reference="transformers",
)


def measure_resident(options: Options, names: Sequence[str], shown: Shown) -> Result:
    """As measure_decode. Raises OptionError if the budget is too small to hold the model."""
    options = sized(options, shown)
    opened, plan = look(options.settings, shown)
    opened.close()
    if plan.step != "resident":
        expected = "a budget that all of the model fits: some of it would be streamed"
        raise OptionError("--memory", options.settings.memory, expected)
    return measure_decode(options, names, shown, RESIDENT)
