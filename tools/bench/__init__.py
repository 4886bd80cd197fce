"""Benchmarks: `python -m tools.bench WHAT`. What they measure is told in cli.py's help.

Nothing heavy is imported here: every arm of a comparison is a process that starts in this package,
and joins its memory group before it grows.
"""
