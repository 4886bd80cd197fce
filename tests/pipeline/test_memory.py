from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.memory import PeakSampler, anonymous_rss, available_memory

MIB = 1 << 20
NO_LIMIT = 0x7FFFFFFFFFFFF000
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
OTHERS = "22 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n23 22 0:5 / /proc rw - proc proc rw\nodd\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8000 MiB, of which 6000 are available."""
    memory = SimpleNamespace(total=8000 * MIB, available=6000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(
    folder: str, limit: int | str, used: int, cache: int = 0, high: int | None = None
) -> dict[str, str]:
    """A version 2 group: MiB in use, of which ``cache`` are file pages."""
    number = str(limit * MIB) if isinstance(limit, int) else limit
    half = cache * MIB // 2
    stat = f"anon 1\nfile {cache * MIB}\ninactive_file {half}\nactive_file {half}\n"
    files = {"memory.max": number, "memory.current": str(used * MIB), "memory.stat": stat}
    files["memory.high"] = "max" if high is None else str(high * MIB)
    return {f"sys/fs/cgroup{folder}/{name}": text + "\n" for name, text in files.items()}


def v1(folder: str, limit: int, used: int, stat: str = "") -> dict[str, str]:
    files = {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used * MIB}\n",
        "memory.stat": stat,
    }
    return {f"sys/fs/cgroup/memory{folder}/{name}": text for name, text in files.items()}


def proc(cgroup: str, mounts: str) -> dict[str, str]:
    return {"proc/self/cgroup": cgroup, "proc/self/mountinfo": OTHERS + mounts}


def proc_v2(group: str, root: str = "/") -> dict[str, str]:
    return proc(f"0::{group}\n", V2_MOUNT.format(root=root))


def proc_v1(group: str, root: str = "/") -> dict[str, str]:
    lines = f"9:name=systemd:/x\n4:cpuset,memory:{group}\n3:cpu,cpuacct:/y\n0::/\n"
    return proc(lines, V1_MOUNT.format(root=root))


def checked(root: Path, limit: int, available: int, source: str = "") -> None:
    """``available_memory`` says this, in MiB, because of that file."""
    found = available_memory(root)
    assert (found.limit, found.available) == (limit * MIB, available * MIB)
    assert found.source == (str(root / "sys/fs/cgroup" / source) if source else "physical memory")


# -- no limit: the machine's own memory


def test_no_groups_at_all(tmp_path: Path) -> None:
    checked(tmp_path, 8000, 6000)


@pytest.mark.parametrize("limit", ["max", "", "nonsense", "-5", "٣"])
def test_v2_without_a_limit(tmp_path: Path, limit: str) -> None:
    checked(lay(tmp_path, proc_v2("/a") | v2("/a", limit, 100)), 8000, 6000)


@pytest.mark.parametrize("limit", [NO_LIMIT, (1 << 63) - 1, (1 << 64) - 1])
def test_v1_without_a_limit(tmp_path: Path, limit: int) -> None:
    stat = f"hierarchical_memory_limit {NO_LIMIT}\n"
    checked(lay(tmp_path, proc_v1("/a") | v1("/a", limit, 100, stat)), 8000, 6000)


def test_a_limit_above_the_machine(tmp_path: Path) -> None:
    checked(lay(tmp_path, proc_v2("/a") | v2("/a", 99_000, 100)), 8000, 6000)


def test_a_limit_without_usage_is_left_out(tmp_path: Path) -> None:
    lay(tmp_path, proc_v2("/a") | v2("/a", 100, 50))
    (tmp_path / "sys/fs/cgroup/a/memory.current").unlink()
    checked(tmp_path, 8000, 6000)


# -- limits


def test_v2_limit(tmp_path: Path) -> None:
    checked(lay(tmp_path, proc_v2("/a") | v2("/a", 500, 120)), 500, 380, "a/memory.max")


def test_v1_limit(tmp_path: Path) -> None:
    lay(tmp_path, proc_v1("/a") | v1("/a", 500 * MIB, 120))
    checked(tmp_path, 500, 380, "memory/a/memory.limit_in_bytes")


def test_v2_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    lay(tmp_path, proc_v2("/a") | v2("/a", 500, 480, cache=400))
    checked(tmp_path, 500, 420, "a/memory.max")


def test_v1_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {300 * MIB}\n"
    stat += f"total_active_file {100 * MIB}\nhierarchical_memory_limit {500 * MIB}\n"
    lay(tmp_path, proc_v1("/a") | v1("/a", 500 * MIB, 480, stat))
    checked(tmp_path, 500, 420, "memory/a/memory.limit_in_bytes")


def test_v1_page_cache_without_totals(tmp_path: Path) -> None:
    stat = f"cache 3\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\nodd line here\n"
    lay(tmp_path, proc_v1("/a") | v1("/a", 500 * MIB, 480, stat))
    checked(tmp_path, 500, 420, "memory/a/memory.limit_in_bytes")


def test_a_group_that_is_over_its_limit(tmp_path: Path) -> None:
    checked(lay(tmp_path, proc_v2("/a") | v2("/a", 500, 600)), 500, 0, "a/memory.max")


def test_counters_that_disagree_for_a_moment(tmp_path: Path) -> None:
    # usage and stat are read one after the other: the difference may be negative
    checked(lay(tmp_path, proc_v2("/a") | v2("/a", 500, 10, cache=40)), 500, 500, "a/memory.max")


def test_v2_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    lay(tmp_path, proc_v2("/a") | v2("/a", "max", 100, high=300))
    checked(tmp_path, 300, 200, "a/memory.high")


@pytest.mark.parametrize("tightest", ["/a", "/a/b", "/a/b/c"])
def test_v2_parents_count(tmp_path: Path, tightest: str) -> None:
    files = proc_v2("/a/b/c")
    for folder in ("/a", "/a/b", "/a/b/c"):
        files |= v2(folder, 400 if folder == tightest else "max", 150)
    checked(lay(tmp_path, files), 400, 250, f"{tightest[1:]}/memory.max")


def test_a_parent_filled_by_others_bounds_what_is_available(tmp_path: Path) -> None:
    files = proc_v2("/a/b") | v2("/a", 1000, 950) | v2("/a/b", 400, 10)
    checked(lay(tmp_path, files), 400, 50, "a/memory.max")


def test_v1_parents_count(tmp_path: Path) -> None:
    files = proc_v1("/a/b") | v1("/a", 400 * MIB, 150) | v1("/a/b", NO_LIMIT, 20)
    checked(lay(tmp_path, files), 400, 250, "memory/a/memory.limit_in_bytes")


def test_v1_limit_of_a_parent_out_of_sight(tmp_path: Path) -> None:
    stat = f"hierarchical_memory_limit {200 * MIB}\n"
    lay(tmp_path, proc_v1("/docker/x", "/docker/x") | v1("", NO_LIMIT, 50, stat))
    checked(tmp_path, 200, 150, "memory/memory.limit_in_bytes")


def test_groups_of_other_processes_do_not_count(tmp_path: Path) -> None:
    files = proc_v2("/a") | v2("/a", "max", 5) | v2("/b", 10, 5) | v2("/a/child", 10, 5)
    checked(lay(tmp_path, files), 8000, 6000)


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/x", "/docker/x"),  # none: the mount shows the container's group
        ("/docker/x", "/elsewhere"),  # the host's path, unknown here
        ("/../../x", "/"),  # outside of the namespace
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container(tmp_path: Path, group: str, root: str, version: int) -> None:
    if version == 2:
        lay(tmp_path, proc_v2(group, root) | v2("", 300, 100))
        checked(tmp_path, 300, 200, "memory.max")
    else:
        lay(tmp_path, proc_v1(group, root) | v1("", 300 * MIB, 100))
        checked(tmp_path, 300, 200, "memory/memory.limit_in_bytes")


def test_both_versions_mounted(tmp_path: Path) -> None:
    files = v1("/a", 300 * MIB, 100)
    files |= proc_v1("/a") | {
        "proc/self/mountinfo": V2_MOUNT.format(root="/").replace("cgroup rw,nosuid", "cgroup/u rw")
        + V1_MOUNT.format(root="/")
    }
    checked(lay(tmp_path, files), 300, 200, "memory/a/memory.limit_in_bytes")


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    files = proc("0::/a\n", V2_MOUNT.format(root="/").replace("fs/cgroup", r"fs/cgroup/my\040own"))
    checked(lay(tmp_path, files | v2("/my own/a", 300, 100)), 300, 200, "my own/a/memory.max")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = available_memory()
    assert 0 < found.available <= found.limit <= psutil.virtual_memory().total


# -- what we hold


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_anonymous_memory_is_counted_and_file_pages_are_not(tmp_path: Path) -> None:
    size = 64 * MIB
    gc.collect()  # not in between
    before = anonymous_rss()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        assert abs(anonymous_rss() - before - size) < 8 * MIB
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[page] for page in range(0, size, mmap.PAGESIZE))
        assert abs(anonymous_rss() - before) < 8 * MIB


def test_status_is_in_kib(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_text("VmRSS:\t  999 kB\nRssAnon:\t     148 kB\nRssFile:\t    2012 kB\n")
    assert anonymous_rss(path) == 148 * 1024


@pytest.mark.parametrize("text", [None, "VmRSS:\t 999 kB\n"])
def test_without_rss_anon(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "status"
    if text is not None:
        path.write_text(text)
    found = anonymous_rss(path)
    assert found == pytest.approx(psutil.Process().memory_full_info().uss, rel=0.2)


# -- the sampler


def scripted(values: list[int], seen: threading.Event) -> Callable[[], int]:
    """A reader that goes through ``values``, stays at the last, and says when it got there."""
    following: Iterator[int] = iter(values)

    def read() -> int:
        value = next(following, None)
        if value is None:
            seen.set()
            return values[-1]
        return value

    return read


def test_sampler_keeps_a_peak_that_has_passed() -> None:
    seen = threading.Event()
    with PeakSampler(0.0001, scripted([10, 30, 70, 20], seen)) as memory:
        assert memory.baseline == 10
        assert seen.wait(30)
        assert memory.peak == 70
    assert (memory.baseline, memory.peak) == (10, 70)


def test_sampler_reads_once_more_on_exit() -> None:
    values = iter([10, 50])
    with PeakSampler(3600, lambda: next(values)) as memory:
        assert memory.peak == 10
    assert memory.peak == 50


def test_sampler_ends_its_thread_when_the_block_fails() -> None:
    def watching() -> int:
        return [thread.name for thread in threading.enumerate()].count("peak-sampler")

    memory = PeakSampler(0.001)
    with contextlib.suppress(KeyError), memory:
        assert watching() == 1
        raise KeyError("the block's own")
    assert watching() == 0
    with memory:  # and can be used again
        assert memory.peak >= memory.baseline > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sampler_sees_an_allocation_that_is_gone_at_the_end() -> None:
    size = 96 * MIB
    gc.collect()  # not in between
    with PeakSampler() as memory:
        held = bytearray(os.urandom(1)) * size
        # It may have looked while the pages were still filled. The test's timeout bounds this.
        while memory.peak - memory.baseline <= size - 8 * MIB:
            threading.Event().wait(0.001)
        del held
    assert anonymous_rss() < memory.baseline + size // 2
    assert memory.peak - memory.baseline < size + 8 * MIB
