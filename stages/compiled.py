"""The compiled part of drafting: the module stages._draft (products.c says what it is made of)."""

from __future__ import annotations

try:
    from stages import _draft
except ImportError:  # no compiler was found when this was installed
    _draft = None  # type: ignore[assignment]

INTERFACE = 6
"""Which of its interfaces we were written for: one left over from another version is not used."""
BUILT = getattr(_draft, "INTERFACE", None) == INTERFACE
COMPILED = _draft.available() if BUILT else None
"""The instructions that the compiled part uses; None where it cannot be used."""
compiled_part = _draft
"""The module itself, to be used where COMPILED is not None."""
