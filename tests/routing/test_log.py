"""What we say goes to the standard library's logger, and nowhere else."""

from __future__ import annotations

import logging

import pytest

from routing.log import log


def test_events_go_to_the_logger_of_the_standard_library(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="paceline"):
        log.info("something happened", session=3)
    assert caplog.messages == ["event='something happened' session=3"]
    assert capsys.readouterr().out == ""


def test_what_nobody_wants_is_not_even_rendered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="paceline"):
        log.warning("never said")
    assert not caplog.messages
