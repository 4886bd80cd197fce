"""Sweeps against transformers' own forward, for every architecture: the same logits row by row.

1e-10 in float64 and 1e-4 in float32, on prompts longer than the windows: packed, chunked, as trees,
after commits that leave out rejected rows, beside other riders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from routing.messages import Sampling
from stages.device import CpuDevice
from stages.embedding import Embedding
from stages.head import LogitRows
from stages.kv import KVStore
from stages.loading import OpenedModel
from stages.noise import Noise
from stages.packs import Rider
from stages.sweep import Model, Sweep
from tests import made
from tests.reference import alone

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in made.ARCHITECTURES},
    **{
        f"llama {kind}": ("llama", {"rope_parameters": rope, "layers": 2})
        for kind, rope in made.ROPES.items()
    },
    "olmo2 yarn": ("olmo2", {"rope_parameters": made.ROPES["yarn"], "layers": 2}),
    "qwen2 untied": ("qwen2", {"tied": False, "layers": 3}),
    "llama tied": ("llama", {"tied": True, "layers": 11, "shards": 4}),
    "smollm3 sliding": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "gemma3 capped": ("gemma3_text", {"final_logit_softcapping": 9.0}),
    **{f"{name} rough": (name, {"rough": True}) for name in made.ARCHITECTURES},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PLACES = 2
PROMPT = 40


class Bench:
    """A made model that sweeps without actors: every layer's tensors are read when needed."""

    def __init__(self, directory: Path, pack_rows: int) -> None:
        self.directory = directory
        self.opened = OpenedModel(directory)
        self.dtype = self.opened.dtype
        self.skeleton = self.opened.skeleton()
        architecture = self.opened.architecture
        embedding = Embedding(
            self.opened.checkpoint, self.opened.embedding_name, self.dtype, architecture.embed, 8
        )
        self.device = CpuDevice()
        shape = self.opened.shape
        self.kv = KVStore(
            self.device, shape, places=PLACES, capacity=96, dtype=self.dtype, poison=True
        )
        self.logit_rows = LogitRows(
            self.device, sessions=PLACES, each=1, vocab=shape.vocab, dtype=self.dtype
        )
        self.model = Model(
            self.skeleton,
            self.opened.rope,
            embedding,
            self.kv,
            pack_rows,
            self.logit_rows,
            Noise(),
        )
        self.skeleton.bind({name: self._read(name) for name in self.skeleton.small()})
        self.head = self._read(shape.head.name)

    def _read(self, name: str) -> torch.Tensor:
        return self.opened.checkpoint.read(name).to(self.dtype)

    def sweep(self, *riders: Rider) -> list[torch.Tensor]:
        """Logits of the rows that each rider asks for."""
        with alone():
            sweep = Sweep(self.model, riders)
            for index in range(len(self.skeleton.layers)):
                sweep.layer(index, {n: self._read(n) for n in self.skeleton.matrices(index)})
            sweep.begin_head()
            for start in range(0, len(self.head), 90):
                sweep.head(start, self.head[start : start + 90])
            assert sweep._scan is not None
            logits = self.opened.architecture.finish(sweep._scan._hidden @ self.head.T)
            counts = [len(rider.asked()) for rider in riders]
            found = list(torch.split(logits[: sum(counts)], counts))
            chosen = sweep._scan.chosen()[: sum(counts)]
            assert torch.cat(found).argmax(-1).tolist() == chosen
            for rider, outcome in zip(riders, sweep.finish(), strict=True):
                assert outcome is not None and outcome.tokens[-1] in chosen
                assert rider.parents is not None or len(outcome.path) == len(rider.tokens)
        return found

    def rider(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None, place: int = 0
    ) -> Rider:
        position = self.kv.committed(place)
        own = None if parents is None else tuple(parents)
        return Rider(place, place, position, tuple(tokens), own, Sampling())

    def prefill(self, tokens: Sequence[int], place: int = 0) -> torch.Tensor:
        """Commits a prompt; the logits after it, (1, vocab)."""
        self.kv.reset(place)
        (logits,) = self.sweep(self.rider(tokens, place=place))
        self.kv.commit(place, range(len(tokens)))
        return logits

    def close(self) -> None:
        self.kv.close()
        self.logit_rows.close()
        self.device.memory.check()
        assert self.device.memory.held == 0
        self.device.close()
        self.opened.close()


RUNS = [(case, torch.float64) for case in CASES]
RUNS += [(case, torch.float32) for case in made.ARCHITECTURES]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    case, dtype = request.param
    architecture, more = CASES[case]
    directory = tmp_path_factory.mktemp("parity") / architecture
    made.make_model(directory, architecture, dtype=dtype, **more)
    bench = Bench(directory, pack_rows=11)
    yield bench
    bench.close()


def reference(bench: Bench, text: Sequence[int]) -> torch.Tensor:
    return made.reference_logits(bench.directory, text, bench.dtype)


def close(bench: Bench, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE[bench.dtype]


def prompt(bench: Bench, seed: int, length: int = PROMPT) -> list[int]:
    return made.make_prompt(bench.opened.shape.vocab, length, seed)


def test_every_row_of_a_text(bench: Bench) -> None:
    """A text as a tree without branches, which asks for all rows."""
    text = prompt(bench, 0)
    bench.kv.reset(0)
    (logits,) = bench.sweep(bench.rider(text, range(-1, PROMPT - 1)))
    close(bench, logits, reference(bench, text))


def test_chunked_prompts_of_two_riders(bench: Bench) -> None:
    first, second = prompt(bench, 1), prompt(bench, 2, 23)
    bench.kv.reset(0)
    bench.kv.reset(1)
    logits = bench.sweep(bench.rider(first), bench.rider(second, place=1))
    close(bench, logits[0], reference(bench, first)[-1:])
    close(bench, logits[1], reference(bench, second)[-1:])


def test_trees_and_what_is_left_of_them(bench: Bench) -> None:
    """Nodes answer as the texts that end in them; rejected ones leave no trace."""
    text, other = prompt(bench, 3), prompt(bench, 4, 17)
    close(bench, bench.prefill(text), reference(bench, text)[-1:])
    bench.prefill(other, place=1)
    tokens = prompt(bench, 5, 9)
    parents = [-1, 0, 0, 1, 1, 2, 4, 4, 6]
    ours, theirs = bench.sweep(
        bench.rider(tokens, parents), bench.rider(tokens[:3], [-1, 0, 1], place=1)
    )
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        branch = text + [tokens[each] for each in path]
        close(bench, ours[node : node + 1], reference(bench, branch)[-1:])
    close(bench, theirs, reference(bench, other + tokens[:3])[-3:])

    bench.kv.commit(0, [0, 1, 4, 7])
    text += [tokens[0], tokens[1], tokens[4], tokens[7]]
    follow = prompt(bench, 6, 3)
    (logits,) = bench.sweep(bench.rider(follow, [-1, 0, 1]))
    close(bench, logits, reference(bench, text + follow)[-3:])


def test_a_corrupted_row_shows(bench: Bench) -> None:
    """The power of the tests above: one wrong committed row, in the last window, is seen."""
    text = prompt(bench, 7)
    bench.prefill(text)
    bench.kv._blocks[0][:, :, :, PROMPT - 3] *= -1
    (logits,) = bench.sweep(bench.rider([1], [-1]))
    difference = (logits - reference(bench, [*text, 1])[-1:]).abs().max()
    assert difference > 0.3


@pytest.mark.parametrize("length", [23, 24, 25, 40])
def test_longrope_on_both_sides_of_its_switch(length: int, tmp_path: Path) -> None:
    made.make_model(tmp_path, "phi3", **made.longrope(24))
    bench = Bench(tmp_path, pack_rows=11)
    text, short = prompt(bench, 8, length), prompt(bench, 9, 12)
    # Riders of both kinds in one sweep, so that a leak from one to the other would show.
    logits = bench.sweep(bench.rider(text), bench.rider(short, place=1))
    close(bench, logits[0], reference(bench, text)[-1:])
    close(bench, logits[1], reference(bench, short)[-1:])
    bench.close()
