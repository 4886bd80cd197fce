"""Links: the way up from a slower tier, and how fast it is.

A fill is queued as a whole and read in chunks by a small pool of threads, first come first
served, several chunks in flight. The next piece's chunks stand in the queue behind the current
one's, so the disk does not idle between pieces as long as there is a free slot to read into.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from routing.errors import EngineClosedError, LinkError
from stages.direct_file import DirectFile
from stages.pieces import BLOCK, Piece, piece_bytes
from stages.streams import Delay, Event
from stages.token_clock import TokenClock, paced

if TYPE_CHECKING:
    from stages.device import Buffer

READERS = 4
CHUNK = 4 * 1024 * 1024
SAMPLE = 256 * 1024 * 1024  # bytes read to measure a link


class Transfer(msgspec.Struct, frozen=True):
    """One hop of a fill: stage "disk" or "copy", time.perf_counter seconds, bytes.

    Fills overlap, so transfers of a stage do: for a busy share take the union of the intervals.
    """

    stage: str
    start: float
    end: float
    nbytes: int


class Filled(msgspec.Struct, frozen=True):
    """The result of a fill: its hops in order."""

    transfers: tuple[Transfer, ...]


class Link(Protocol):
    """The way from a slower tier into a device's buffers."""

    @property
    def direct(self) -> bool:
        """Whether reads go around the page cache."""

    def fill(self, piece: Piece, buffer: Buffer) -> Event[Filled]:
        """Queues the transfer of a piece into a buffer; returns at once.

        Fills begin in the order in which they were asked for. The buffer must not be read,
        refilled or freed until the event has ended, well or badly: after a failure too, nothing
        writes to it any more. The event fails with LinkError. Raises EngineClosedError once the
        link is closed.
        """

    def measure(self, pieces: Sequence[Piece], nbytes: int = SAMPLE) -> float:
        """The link's own bandwidth in GB/s (10^9), by plain aligned reads of what `pieces` are made
        of, the first `nbytes` of it. Blocks.

        Takes some 16 MiB of memory meanwhile. Raises LinkError.
        """

    def close(self) -> None:
        """Waits for what is under way and closes the files. Blocks. May be called again."""


class _Chunk(msgspec.Struct, frozen=True):
    """Whole blocks of a file: `size` bytes of memory at slot offset `place`, `needed` of value."""

    file: DirectFile
    offset: int
    place: int
    size: int
    needed: int


class _Fill:
    """A fill under way: ends its event when the last of its chunks has ended."""

    def __init__(self, chunks: int, nbytes: int) -> None:
        self.event: Event[Filled] = Event()
        self.asked_at = time.perf_counter()
        self.error: BaseException | None = None
        self._left = chunks
        self._nbytes = nbytes
        self._start: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._start is None:
                self._start = time.perf_counter()

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left:
                return
        if self.error is not None:
            self.event.fail(self.error)
        else:
            start = self._start if self._start is not None else self.asked_at
            disk = Transfer("disk", start, time.perf_counter(), self._nbytes)
            self.event.resolve(Filled((disk,)))


class DiskLink:
    """Direct reads from files into host memory, `readers` chunks of `chunk` bytes at a time.

    `gbps` slows it down to a simulated disk of that speed. `delay` runs before each chunk is
    read. Raises LinkError when a file cannot be opened.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        readers: int = READERS,
        chunk: int = CHUNK,
        gbps: float | None = None,
        delay: Delay | None = None,
    ) -> None:
        if readers < 1 or chunk < BLOCK or chunk % BLOCK:
            raise ValueError(
                f"readers {readers}, chunk {chunk} given; at least 1 reader and a multiple of "
                f"{BLOCK} bytes expected"
            )
        self._clock = None if gbps is None else TokenClock(gbps)
        self._readers = readers
        self._chunk = chunk
        self._delay = delay
        self._files = _open_all(paths)
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="link")

    @property
    def direct(self) -> bool:
        """Whether all files are read around the page cache."""
        return all(file.direct for file in self._files.values())

    def fill(self, piece: Piece, buffer: Buffer) -> Event[Filled]:
        """See Link. The piece's files must be among those the link was opened with."""
        assert piece_bytes(piece) <= buffer.nbytes, (piece_bytes(piece), buffer.nbytes)
        view = buffer.view
        chunks = list(self._cut(piece))
        fill = _Fill(len(chunks), piece.nbytes)
        for done, chunk in enumerate(chunks):
            try:
                self._pool.submit(self._read, fill, chunk, view)
            except RuntimeError:
                if not done:
                    raise EngineClosedError() from None
                for _ in chunks[done:]:  # closed meanwhile by another thread
                    fill.end(EngineClosedError())
                break
        return fill.event

    def measure(self, pieces: Sequence[Piece], nbytes: int = SAMPLE) -> float:
        """See Link."""
        chunks = (chunk for piece in pieces for chunk in self._cut(piece))
        reads = [_Read(chunk.file, chunk.offset, chunk.needed) for chunk in chunks]
        return _measure(_first(reads, nbytes), self._readers, self._chunk, self._clock)

    def close(self) -> None:
        """Waits for the reads under way and closes the files. Blocks. May be called again."""
        self._pool.shutdown(wait=True)
        for file in self._files.values():
            file.close()

    def _cut(self, piece: Piece) -> Iterator[_Chunk]:
        for extent in piece.extents:
            skew = extent.offset % BLOCK
            whole = skew + extent.nbytes
            for start in range(0, whole, self._chunk):
                needed = min(self._chunk, whole - start)
                yield _Chunk(
                    file=self._files[extent.path],
                    offset=extent.offset - skew + start,
                    place=extent.slot_offset - skew + start,
                    size=-(-needed // BLOCK) * BLOCK,
                    needed=needed,
                )

    def _read(self, fill: _Fill, chunk: _Chunk, view: memoryview) -> None:
        try:
            if fill.error is None:  # no use in the rest of a piece that has failed
                fill.begin()
                if self._delay is not None:
                    self._delay()
                with paced(self._clock, chunk.needed, fill.asked_at):
                    place = view[chunk.place : chunk.place + chunk.size]
                    chunk.file.read_into(place, chunk.offset, chunk.needed)
        except BaseException as error:
            fill.end(error)
        else:
            fill.end()


class _Read(NamedTuple):
    """`size` bytes of a file from a block's beginning on."""

    file: DirectFile
    offset: int
    size: int


def measure_link(
    paths: Sequence[str], nbytes: int = SAMPLE, readers: int = READERS, chunk: int = CHUNK
) -> float:
    """GB/s (10^9) of plain aligned reads of the files, before it is known what sweeps will read.

    Reads up to `nbytes` from the beginnings of the files on. Blocks. Raises LinkError.
    """
    files = _open_all(paths)
    try:
        reads = [
            _Read(file, offset, min(chunk, file.size - offset))
            for file in files.values()
            for offset in range(0, file.size, chunk)
        ]
        if not reads:
            raise LinkError(", ".join(files), "no bytes there to measure with")
        return _measure(_first(reads, nbytes), readers, chunk, None)
    finally:
        for file in files.values():
            file.close()


def _open_all(paths: Sequence[str]) -> dict[str, DirectFile]:
    files: dict[str, DirectFile] = {}
    try:
        for path in dict.fromkeys(paths):
            files[path] = DirectFile(path)
    except LinkError:
        for file in files.values():
            file.close()
        raise
    return files


def _first(reads: Sequence[_Read], nbytes: int) -> list[_Read]:
    """As many as come to `nbytes`, the last one cut off there."""
    found = []
    for read in reads:
        if nbytes <= 0:
            break
        found.append(read._replace(size=min(read.size, nbytes)))
        nbytes -= read.size
    return found


def _measure(reads: Sequence[_Read], readers: int, chunk: int, clock: TokenClock | None) -> float:
    total = sum(read.size for read in reads)
    began = time.perf_counter()

    def work(first: int) -> None:
        with mmap.mmap(-1, chunk) as scratch:
            for file, offset, size in islice(reads, first, None, readers):
                with paced(clock, size, began):
                    file.read_into(memoryview(scratch), offset, size)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(work, range(readers)))
    return total / (time.perf_counter() - began) / 1e9
