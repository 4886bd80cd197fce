"""The processors' energy counters (RAPL), where the machine has them and lets us read them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_POWERCAP: Final = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules that all processor packages have used since `start`. Includes whoever else is busy."""

    def __init__(self, root: Path = _POWERCAP) -> None:
        # A package's parts have zones of their own, and so may the machine as a whole.
        self._zones = sorted(zone for zone in root.glob("intel-rapl:*") if _is_package(zone))
        self._began: list[int] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._began = self._read()

    def joules(self) -> float | None:
        """Since `start`; None where there are no counters. They wrap round in about an hour."""
        ended = self._read()
        if not self._began or ended is None:
            return None
        total = 0
        for zone, began, now in zip(self._zones, self._began, ended, strict=True):
            # The counter goes up to a stated value and then starts from 0.
            wrapped = int((zone / "max_energy_range_uj").read_text()) if now < began else 0
            total += now + wrapped - began
        return total / 1e6

    def _read(self) -> list[int] | None:
        try:
            return [int((zone / "energy_uj").read_text()) for zone in self._zones]
        except (OSError, ValueError):
            return None


def _is_package(zone: Path) -> bool:
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False
