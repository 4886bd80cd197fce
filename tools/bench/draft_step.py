"""One step of the drafter, beside what it is made of: its products alone, and reading their bytes.

A step of four nodes below a root, with every matrix a substitute in the format that the arm has
planned, in a process where no engine lives. What it costs above its products is our own doing; what
these cost above a plain read of their bytes is the kernels'.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec
import torch

from stages.kv import KVStore
from stages.loading import OpenedModel
from stages.progress import Progress
from stages.shapes import ModelShape
from stages.substitutes import Substitute
from tools.bench.machine import measure_read
from tools.bench.protocol import PlanFacts
from tools.bench.target_rows import TargetRows
from tools.bench.tree_drafter import TreeDrafter

ROWS, COMMITTED_ROWS = 4, 100
NODES = 8
"""Children of the root that there is room for."""
REPEATS, LEAST, LONGEST_S = 30, 5, 10.0
"""Pairs of a step and its products: fewer, but not fewer than the least, where they take long."""
THREADS = 1
"""As the drafter has beside a sweep. More stall beside anybody else's work (stages/stalls.py), and
then it is that which is measured."""
NOTE = (
    "draft_step: 4 nodes of a tree over made-up keys and values of committed_rows rows, every"
    " matrix a substitute in the planned format, embedding rows cached, no engine alive; kernels_s:"
    " the same substitutes' products alone, in turn with the steps; byte_floor_s: their bytes at"
    " the speed of a plain read; medians, all on as many threads as a draft step has beside a sweep"
)


class DraftStep(msgspec.Struct, frozen=True):
    """Medians in seconds; `spread`: the least and the most of step over products, pair by pair.

    bytes: of all substitutes, each of which a step reads once. memory_gbps: of a plain read.
    """

    rows: int
    threads: int
    committed_rows: int
    step_s: float
    kernels_s: float
    byte_floor_s: float
    bytes: int
    memory_gbps: float
    over_kernels: float
    over_byte_floor: float
    spread: tuple[float, float]


class Products:
    """The products of one step of `rows` rows and nothing else, into memory that there is."""

    def __init__(
        self,
        substitutes: Mapping[tuple[str, ...], Substitute],
        shape: ModelShape,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        matrices = {matrix.name: matrix for matrix in (*shape.matrices(), shape.head)}
        generator = torch.Generator().manual_seed(0)
        self.nbytes = sum(substitute.nbytes for substitute in substitutes.values())
        self._calls: list[Callable[[], object]] = []
        for names, substitute in substitutes.items():
            x = torch.randn(rows, matrices[names[0]].cols, generator=generator).to(dtype)
            compiled = substitute.compiled
            if compiled is None:
                self._calls.append(functools.partial(substitute.matmul, x))
            else:
                out = torch.empty(rows, sum(matrices[name].rows for name in names))
                self._calls.append(functools.partial(compiled.matmul, x, out))

    def time(self) -> float:
        """Seconds of all of them, one after the other."""
        began = time.perf_counter()
        for call in self._calls:
            call()
        return time.perf_counter() - began


def measure_draft_step(model: Path, plan: PlanFacts | None, progress: Progress) -> DraftStep | None:
    """Of the model in directory `model`, whose arms have ended. None where `plan` has no drafts."""
    if plan is None or plan.substitute is None:
        return None
    with ExitStack() as stack:
        opened = OpenedModel(model)
        stack.callback(opened.close)
        committed = min(COMMITTED_ROWS, opened.shape.max_positions - ROWS)
        target = stack.enter_context(TargetRows(opened, 1, committed + 1))
        _commit_made_up(target.kv, opened.shape, committed)
        drafter = TreeDrafter(target, plan.substitute, NODES, NODES, progress)
        stack.callback(drafter.close)
        products = Products(drafter.substitutes, opened.shape, ROWS, opened.dtype)
        progress.step("timing a draft step", 0, 0)
        with _width(THREADS):
            before = measure_read()
            pairs = time_pairs(drafter, products, committed)
            gbps = (before + measure_read()) / 2
    return summarize(pairs, committed, products.nbytes, gbps)


def time_pairs(
    drafter: TreeDrafter, products: Products, committed: int
) -> list[tuple[float, float]]:
    """Seconds of a step and of its products, taken in turn. Both follow a pass over all bytes."""
    text = [0] * (committed + 1)
    pairs: list[tuple[float, float]] = []
    ends = time.perf_counter() + LONGEST_S
    for number in range(REPEATS + 1):
        if number > LEAST and time.perf_counter() > ends:
            break
        _, step_s = drafter.time_steps(text, ROWS)
        pairs.append((step_s, products.time()))
    return pairs[1:]  # the first time is slower


def summarize(
    pairs: Sequence[tuple[float, float]], committed: int, nbytes: int, gbps: float
) -> DraftStep:
    """Pure: the figures of `pairs`, at least one, of step and products."""
    step_s, kernels_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    floor_s = nbytes / gbps / 1e9
    ratios = [step / kernels for step, kernels in pairs]
    return DraftStep(
        rows=ROWS,
        threads=THREADS,
        committed_rows=committed,
        step_s=step_s,
        kernels_s=kernels_s,
        byte_floor_s=floor_s,
        bytes=nbytes,
        memory_gbps=gbps,
        over_kernels=step_s / kernels_s,
        over_byte_floor=step_s / floor_s,
        spread=(min(ratios), max(ratios)),
    )


def _commit_made_up(kv: KVStore, shape: ModelShape, rows: int) -> None:
    """Keys and values as good as any for the time that it takes to look at them."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(shape.layers)):
        size = (2, shape.kv_heads, rows, shape.head_dim)
        keys, values = torch.randn(size, generator=generator)
        kv.write(0, layer, 0, keys, values)
    kv.commit(0, range(rows))


@contextmanager
def _width(threads: int) -> Iterator[None]:
    """torch's intra-op threads, for as long as it lasts."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
