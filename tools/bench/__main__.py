"""`python -m tools.bench WHAT`."""

from __future__ import annotations

from tools.bench.cli import main

if __name__ == "__main__":
    main()
