"""Events for whoever runs us: structlog over the standard library's logger "paceline".

A library prints nothing of its own accord, so the program decides with `logging` what is shown
where; without any set-up Python shows warnings on standard error.
"""

from __future__ import annotations

import logging

import structlog

log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("paceline"),
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.processors.KeyValueRenderer(key_order=["event"]),
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
)
