"""Devices: where weights and KV live and where they are computed on.

Everything above works with four things and never asks what machine it is on: a device hands out
accounted memory (Buffer), ordered workers (Stream, whose launches end in an Event) and the way up
from the slower tier (Link). CpuDevice is the CPU with its budget of RAM; the disk is the tier
below it, and reads land straight in the buffers.

How CUDA will fit: CudaDevice.allocate returns a Buffer over one uint8 device tensor, with no host
`view`; `stream` returns a Stream whose worker enters its own torch.cuda.Stream, records a CUDA
event after each call and resolves the Event when that has passed; `after` additionally makes the
CUDA stream wait for the other's CUDA event, so the host need not. `open_link` returns what
SimulatedAccelerator's link already is: direct reads into exact-size host staging memory
(registered with cudaHostRegister, as the pinned allocator rounds up to powers of two), then
copies on a stream of their own. MemoryAccount stays, and its peak is compared with the
allocator's. SimulatedAccelerator stands in for it in tests and keeps the same rules.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from routing.errors import DeviceMemoryError
from stages.cores import Cores
from stages.link import CHUNK, READERS, DiskLink, Link
from stages.streams import Delay, Stream

PAGE = mmap.PAGESIZE


class MemoryAccount:
    """What a device's memory is used for, in bytes, against a limit. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._by_name: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, nbytes: int, what: str) -> None:
        """Books nbytes under the name `what`, wholly or not at all.

        Raises DeviceMemoryError when the limit would be passed.
        """
        assert nbytes >= 0, nbytes
        with self._lock:
            if self.limit is not None and self.held + nbytes > self.limit:
                raise DeviceMemoryError(nbytes, self.held, self.limit, what)
            self.held += nbytes
            self.peak = max(self.peak, self.held)
            self._by_name[what] += nbytes

    def give(self, nbytes: int, what: str) -> None:
        """Returns nbytes that were booked under `what`."""
        with self._lock:
            assert 0 <= nbytes <= self._by_name[what], (what, nbytes, self._by_name[what])
            self.held -= nbytes
            self._by_name[what] -= nbytes
            if not self._by_name[what]:
                del self._by_name[what]

    @property
    def by_name(self) -> dict[str, int]:
        """Bytes held under each name; a copy."""
        with self._lock:
            return dict(self._by_name)

    def check(self) -> None:
        """Asserts conservation: the names add up to what is held, within limit and peak."""
        with self._lock:
            assert sum(self._by_name.values()) == self.held, (self._by_name, self.held)
            assert all(nbytes >= 0 for nbytes in self._by_name.values()), self._by_name
            assert 0 <= self.held <= self.peak, (self.held, self.peak)
            assert self.limit is None or self.peak <= self.limit, (self.peak, self.limit)


class Buffer(Protocol):
    """Accounted memory of a device, page-aligned."""

    @property
    def nbytes(self) -> int:
        """The size in bytes: what was asked for, rounded up to whole pages."""

    @property
    def view(self) -> memoryview:
        """The bytes, writable, for reads from the disk; only where the host can address them."""

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A tensor over the bytes from `offset` on, no copy.

        It is good until the bytes are overwritten or the buffer is freed, and must not be used
        after that. `offset` must be a multiple of the item size.
        """

    def free(self) -> None:
        """Gives the memory back, to the system and to the account. A second call does nothing."""


class HostBuffer:
    """A page-aligned anonymous mapping: zeroed when new, given back to the system on `free`.

    malloc would keep freed pages for itself, and would not align them for direct reads.
    """

    def __init__(self, nbytes: int, what: str, memory: MemoryAccount) -> None:
        assert nbytes > 0, nbytes
        self._nbytes = -(-nbytes // PAGE) * PAGE
        self._what = what
        self._memory = memory
        memory.take(self._nbytes, what)
        try:
            self._map: mmap.mmap | None = _anonymous(self._nbytes)
        except OSError:
            memory.give(self._nbytes, what)
            raise

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def view(self) -> memoryview:
        return memoryview(self._live())

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        assert offset % dtype.itemsize == 0, (offset, dtype)
        assert 0 <= offset <= self._nbytes - count * dtype.itemsize, (offset, shape, self._nbytes)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._live(), dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def free(self) -> None:
        if self._map is None:
            return
        # The pages go back now. The address range goes when the last tensor over it has gone
        # (each holds a reference), so a tensor kept by mistake reads zeros and does not crash.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = None
        self._memory.give(self._nbytes, self._what)

    def _live(self) -> mmap.mmap:
        assert self._map is not None, f"buffer {self._what!r} was used after it was freed"
        return self._map


def _anonymous(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # Python's default is shared memory, which counts otherwise
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


class Device(Protocol):
    """A place to keep weights and to compute."""

    @property
    def name(self) -> str:
        """ "cpu", "simulated", ..."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of its buffers are."""

    @property
    def memory(self) -> MemoryAccount:
        """The account of its memory. Book tensors that are not buffers there too."""

    @property
    def cores(self) -> Cores:
        """The CPU cores that its streams share."""

    def allocate(self, nbytes: int, what: str) -> Buffer:
        """Memory for `what`; the caller frees it. Raises DeviceMemoryError over the limit."""

    def stream(self, name: str) -> Stream:
        """A new ordered worker; the device closes it. `name` must be new."""

    def open_link(
        self,
        paths: Sequence[str],
        *,
        readers: int = READERS,
        chunk: int = CHUNK,
        gbps: float | None = None,
    ) -> Link:
        """The way from the slower tier into buffers of this device; the device closes it.

        `gbps` (10^9 bytes a second) puts a simulated disk of that speed in place of the real one.
        """

    def close(self) -> None:
        """Closes links, then streams, after the work under way. Blocks. Buffers stay."""


class Workers:
    """The streams and links of a device whose work is done by threads of this process.

    Owns them and the cores they share; `delay` runs before each piece of work.
    """

    def __init__(self, cores: int | None, delay: Delay | None) -> None:
        self.cores = Cores(cores or available_cores())
        self._delay = delay
        self._streams: dict[str, Stream] = {}
        self._links: list[Link] = []

    def stream(self, name: str) -> Stream:
        """A new ordered worker that shares this device's cores; see Device."""
        assert name not in self._streams, f"stream {name!r} exists already"
        self._streams[name] = Stream(name, self.cores, self._delay)
        return self._streams[name]

    def close(self) -> None:
        """Closes links, then streams, after the work under way. Blocks. May be called again."""
        for link in self._links:
            link.close()
        for stream in self._streams.values():
            stream.close()
        self.cores.close()


class CpuDevice(Workers):
    """The CPU, with `limit` bytes of RAM to spend (None: no limit).

    `cores` is the number of cores to use, by default those this process may run on. `delay` runs
    before each piece of work and each read (for tests).
    """

    def __init__(
        self, limit: int | None = None, cores: int | None = None, delay: Delay | None = None
    ) -> None:
        super().__init__(cores, delay)
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.memory = MemoryAccount(limit)

    def allocate(self, nbytes: int, what: str) -> Buffer:
        """A page-aligned anonymous mapping. Raises DeviceMemoryError over the limit."""
        return HostBuffer(nbytes, what, self.memory)

    def open_link(
        self,
        paths: Sequence[str],
        *,
        readers: int = READERS,
        chunk: int = CHUNK,
        gbps: float | None = None,
    ) -> Link:
        """Direct reads from the disk into this device's buffers."""
        link = DiskLink(paths, readers=readers, chunk=chunk, gbps=gbps, delay=self._delay)
        self._links.append(link)
        return link


def available_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
