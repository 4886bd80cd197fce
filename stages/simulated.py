"""An accelerator that is not there: its memory, its link and its order, on the CPU.

It keeps the rules that a real one would enforce. Its memory ends exactly at `limit`. The host
cannot address its buffers (`view` is refused), so bytes get there only by a copy from host
memory: the disk reads into a staging buffer, then one copy worker brings it over at `link_gbps`.
Fresh memory may hold NaN, and every piece of work may begin late.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from routing.errors import EngineClosedError
from stages.cores import Cores
from stages.device import Buffer, HostBuffer, MemoryAccount, Workers
from stages.link import CHUNK, READERS, SAMPLE, DiskLink, Filled, Link, Transfer
from stages.pieces import Piece, piece_bytes
from stages.streams import Delay, Event, Stream, random_delay
from stages.token_clock import TokenClock, paced

STAGING = 2  # buffers: one is read into while the other is copied from


class DeviceBuffer(HostBuffer):
    """Memory of the simulated accelerator."""

    @property
    def view(self) -> memoryview:
        raise TypeError("the host cannot address an accelerator's memory: copy through a link")


class SimulatedAccelerator(Workers):
    """A device of `limit` bytes behind a link of `link_gbps` (10^9 bytes a second).

    Up to `host_bytes` of the pieces stay in host memory once they were read (the tier between
    disk and device); staging buffers are held beside them, and `host` accounts for both. `delays`
    seeds random pauses before each piece of work; `poison` makes fresh memory NaN.
    """

    def __init__(
        self,
        limit: int,
        link_gbps: float,
        *,
        host_bytes: int = 0,
        cores: int | None = None,
        delays: random.Random | None = None,
        poison: bool = False,
    ) -> None:
        super().__init__(cores, None if delays is None else random_delay(delays))
        self.name = "simulated"
        self.torch_device = torch.device("cpu")
        self.memory = MemoryAccount(limit)
        self.host = MemoryAccount()
        self._link_gbps = link_gbps
        self._host_bytes = host_bytes
        self._poison = poison

    def allocate(self, nbytes: int, what: str) -> Buffer:
        """Device memory in whole pages. Raises DeviceMemoryError over the limit."""
        buffer = DeviceBuffer(nbytes, what, self.memory)
        if self._poison:
            buffer.tensor(torch.uint8, (buffer.nbytes,)).fill_(0xFF)
        return buffer

    def open_link(
        self,
        paths: Sequence[str],
        *,
        readers: int = READERS,
        chunk: int = CHUNK,
        gbps: float | None = None,
    ) -> Link:
        """Disk to staging to device. `gbps` is the simulated disk's; None: the real disk's."""
        disk = DiskLink(paths, readers=readers, chunk=chunk, gbps=gbps, delay=self._delay)
        link = SimulatedLink(disk, self._link_gbps, self.host, self._host_bytes, self._delay)
        self._links.append(link)
        return link


class _Job(NamedTuple):
    """A fill that was asked for."""

    piece: Piece
    buffer: Buffer
    event: Event[Filled]
    asked_at: float


class _Home(NamedTuple):
    """Host memory that a piece was read into, and the end of that read."""

    buffer: HostBuffer
    read: Event[Filled]


class SimulatedLink:
    """Fills device buffers by way of staging buffers in host memory. See Link."""

    def __init__(
        self, disk: DiskLink, gbps: float, host: MemoryAccount, keep: int, delay: Delay | None
    ) -> None:
        self._disk = disk
        self._host = host
        self._keep = keep
        self._kept: dict[int, _Home] = {}  # by piece index; read once
        self._clock = TokenClock(gbps)
        # A copy engine takes no core of those that compute, nor more than one.
        self._copies = Stream("copy", Cores(1), delay)
        self._staging: deque[HostBuffer] = deque()
        self._staged = 0
        self._waiting: deque[_Job] = deque()
        self._under_way = 0
        self._closed = False
        self._idle = threading.Condition(threading.RLock())

    @property
    def direct(self) -> bool:
        """Whether the disk is read around the page cache."""
        return self._disk.direct

    def fill(self, piece: Piece, buffer: Buffer) -> Event[Filled]:
        """See Link. All buffers must have the size of the first, as a ring's slots have."""
        assert piece_bytes(piece) <= buffer.nbytes, (piece_bytes(piece), buffer.nbytes)
        job = _Job(piece, buffer, Event(), time.perf_counter())
        with self._idle:
            if self._closed:
                raise EngineClosedError()
            self._waiting.append(job)
            self._feed()
        return job.event

    def measure(self, pieces: Sequence[Piece], nbytes: int = SAMPLE) -> float:
        """GB/s of the slower of the two hops: the disk as measured, the copy as set."""
        return min(self._disk.measure(pieces, nbytes), self._clock.gbps)

    def close(self) -> None:
        """Waits for the fills asked for, then frees host memory. Blocks. May be called again."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._waiting and not self._under_way)
        self._copies.close()
        self._disk.close()
        for buffer in (*self._staging, *(home.buffer for home in self._kept.values())):
            buffer.free()

    def _feed(self) -> None:
        """Starts the fills for which there is host memory, in order. The caller holds the lock."""
        while self._waiting:
            job = self._waiting[0]
            try:
                started = self._start(job)
            except BaseException as error:
                job.event.fail(error)
                started = True
            if not started:
                return
            self._waiting.popleft()

    def _start(self, job: _Job) -> bool:
        """Queues the fill's read and copy, unless all staging buffers are taken."""
        home = self._kept.get(job.piece.index)
        if home is not None:  # read before, or being read: its copy comes after that
            self._queue_copy(job, home, fresh=False)
            return True
        kept = piece_bytes(job.piece) <= self._keep
        source = self._new_home(job.piece) if kept else self._free_staging(job.buffer.nbytes)
        if source is None:
            return False
        home = _Home(source, self._disk.fill(job.piece, source))
        if kept:
            self._kept[job.piece.index] = home
        self._queue_copy(job, home, fresh=True, staged=not kept)
        return True

    def _new_home(self, piece: Piece) -> HostBuffer:
        buffer = HostBuffer(piece_bytes(piece), "kept pieces", self._host)
        self._keep -= piece_bytes(piece)
        return buffer

    def _free_staging(self, nbytes: int) -> HostBuffer | None:
        if self._staging:
            return self._staging.popleft()
        if self._staged == STAGING:
            return None
        buffer = HostBuffer(nbytes, "staging", self._host)
        self._staged += 1
        return buffer

    def _queue_copy(self, job: _Job, home: _Home, fresh: bool, staged: bool = False) -> None:
        self._under_way += 1
        copy = self._copies.launch(self._copy, job, home, fresh, after=[home.read])
        copy.when_done(lambda: self._finish(job, copy, home.buffer if staged else None))

    def _copy(self, job: _Job, home: _Home, fresh: bool) -> Filled:
        hops = home.read.wait().transfers if fresh else ()
        size = piece_bytes(job.piece)
        ready_at = hops[-1].end if hops else job.asked_at
        start = time.perf_counter()
        with paced(self._clock, job.piece.nbytes, ready_at):
            target = job.buffer.tensor(torch.uint8, (size,))
            target.copy_(home.buffer.tensor(torch.uint8, (size,)))
        return Filled((*hops, Transfer("copy", start, time.perf_counter(), job.piece.nbytes)))

    def _finish(self, job: _Job, copy: Event[Filled], staging: HostBuffer | None) -> None:
        """Passes the staging buffer on, then ends the fill; in the thread of the copies."""
        with self._idle:
            if staging is not None:
                self._staging.append(staging)
            self._under_way -= 1
            self._feed()
            self._idle.notify_all()
        try:
            filled = copy.wait()
        except BaseException as error:
            job.event.fail(error)
        else:
            job.event.resolve(filled)
