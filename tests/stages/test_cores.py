from __future__ import annotations

import random
import threading
import time

import pytest

from stages.cores import Cores


def test_one_alone_has_all_cores_and_busy_actors_share_them() -> None:
    cores = Cores(4)
    with cores.claim("verify") as alone:
        assert alone == 4
    with cores.busy("verify"), cores.busy("draft"):
        assert cores.width("verify") == cores.width("draft") == 2
        with cores.busy("route"):  # three on four cores: one each, one core idle
            assert cores.width("draft") == 1
    assert cores.width("draft") == 4
    cores.check()
    assert cores.held == 0


def test_busy_nests() -> None:
    cores = Cores(2)
    with cores.busy("draft"):
        with cores.busy("draft"):
            pass
        assert cores.width("verify") == 1
    assert cores.width("verify") == 2


def test_more_actors_than_cores_get_one_each_in_turn() -> None:
    cores = Cores(1)
    with cores.busy("a"), cores.busy("b"), cores.busy("c"):
        assert cores.width("d") == 1


def test_no_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Cores(0)


def test_a_wider_claim_waits_until_the_cores_are_free() -> None:
    cores = Cores(2)
    holds, go, got = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with cores.claim("a"):
            holds.set()
            go.wait()

    def want() -> None:
        with cores.claim("b") as width:
            assert width == 1  # `a` has released, but `a` is declared busy
            got.set()

    threads = [threading.Thread(target=hold), threading.Thread(target=want)]
    with cores.busy("a"):
        threads[0].start()
        holds.wait()
        threads[1].start()
        waits = not got.wait(0.02)
        go.set()
        for thread in threads:
            thread.join()
        assert waits
        assert got.is_set()
    cores.check()


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_threads_never_sum_above_the_cores_and_nobody_starves(total: int) -> None:
    cores = Cores(total)
    running = 0
    highest = 0
    lock = threading.Lock()

    def work(name: str, seed: int) -> None:
        nonlocal running, highest
        generator = random.Random(seed)
        for _ in range(30):
            with cores.busy(name), cores.claim(name) as width:
                with lock:
                    running += width
                    highest = max(highest, running)
                cores.check()
                time.sleep(generator.random() * 0.001)
                with lock:
                    running -= width

    threads = [threading.Thread(target=work, args=(f"w{n}", n)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cores.check()
    assert cores.held == 0
    assert 1 <= highest <= total
