from __future__ import annotations

import pytest

from stages.token_clock import TokenClock, paced


class FakeTime:
    """A clock that only sleeping moves, and that always sleeps `late` seconds too long."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late


def make(late: float = 0.0) -> tuple[TokenClock, FakeTime]:
    time = FakeTime(late)
    return TokenClock(1.0, time.clock, time.sleep), time


def test_a_transfer_lasts_as_long_as_its_bytes_take() -> None:
    clock, time = make()
    with paced(clock, 2_000_000, time.now):
        time.now += 0.0005
    assert time.now == pytest.approx(100.002)


def test_oversleeping_does_not_add_up_over_back_to_back_transfers() -> None:
    clock, time = make(late=0.0003)
    for _ in range(1000):
        with paced(clock, 1_000_000, 100.0):  # all were ready from the start
            pass
    assert time.now == pytest.approx(101.0003, abs=1e-6)


def test_idle_time_earns_no_credit() -> None:
    clock, time = make()
    time.now += 5.0
    with paced(clock, 1_000_000, time.now):
        pass
    assert time.now == pytest.approx(105.001)


def test_slow_work_is_not_caught_up_faster_than_the_link() -> None:
    clock, time = make()
    with paced(clock, 1_000_000, 100.0):
        time.now += 1.0  # a thousand times its share
    with paced(clock, 1_000_000, 100.0):
        pass
    assert time.now == pytest.approx(101.001)


def test_transfers_at_once_share_the_bandwidth() -> None:
    clock, _ = make()
    ends = [clock.reserve(1_000_000, 100.0) for _ in range(4)]
    assert ends == pytest.approx([100.001, 100.002, 100.003, 100.004])


def test_no_clock_no_wait_and_no_bandwidth_is_refused() -> None:
    with paced(None, 10**12, 0.0):
        pass
    for gbps in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            TokenClock(gbps)
