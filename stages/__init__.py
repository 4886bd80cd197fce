"""The work: devices, weights, KV, models, trees, and the actors that use them."""

from __future__ import annotations

import os

# torch's threads wait for each other by spinning, for milliseconds. Beside any other busy process
# that starves the very thread they wait for (products 10 to 100 times slower were seen). A short
# spin is as fast on a quiet machine. Read when torch is first imported, so an embedding program
# that imports torch before us keeps what it has; one that sets the variable keeps that too.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
