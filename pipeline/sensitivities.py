"""How much each layer's substitutes hurt, measured at a model's first load and kept in the cache.

A plan of that first load knows nothing of it; those of later ones do (mixtures.py).
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import msgspec

from pipeline.calibration import LEAST_WEIGHTS
from pipeline.whole_file import write_whole
from routing.errors import OptionError
from stages.cache import cache_dir
from stages.loading import OpenedModel

_VERSION = 1
"""Of the measurement: raise it when its figures change."""


class Sensitivities:
    """The figures of one model: `layers` has a number from 0 on for each layer, or is None as yet.

    Models too small to be calibrated for have none: they have answered before it pays.
    """

    def __init__(self, opened: OpenedModel) -> None:
        """Reads a little of every tensor. Raises LinkError."""
        shape = opened.shape
        self._layers = len(shape.layers)
        self._path: Path | None = None
        if sum(m.elements for m in (*shape.matrices(), shape.head)) >= LEAST_WEIGHTS:
            with contextlib.suppress(OptionError):  # told of where a model needs the cache
                name = f"{opened.checkpoint.fingerprint()}-{_VERSION}.json"
                self._path = cache_dir() / "sensitivities" / name
        self.layers = self._read()

    def _read(self) -> tuple[float, ...] | None:
        """None too for a file that is damaged or another's."""
        if self._path is None:
            return None
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=tuple[float, ...])
        except (OSError, msgspec.MsgspecError):
            return None
        sound = len(found) == self._layers and all(map(_is_sound, found))
        return found if sound else None

    @property
    def wanted(self) -> bool:
        """Whether they are to be measured: there are none, and they could be kept."""
        return self.layers is None and self._path is not None

    def keep(self, layers: tuple[float, ...]) -> None:
        """For later loads. A disk that is full costs a measurement the next time, no more."""
        self.layers = layers
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, msgspec.json.encode(layers))


def _is_sound(figure: float) -> bool:
    return math.isfinite(figure) and figure >= 0
