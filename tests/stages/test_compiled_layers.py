"""The compiled layers say what DraftLayer says in torch, and look at nothing else than it may."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.mixtures import PAIRS
from stages import compiled_layers, draft_stack, weights
from stages.compiled import COMPILED, compiled_part
from stages.compiled_layers import _LAYER, CompiledLayers
from stages.device import CpuDevice
from stages.draft_stack import DraftStack
from stages.kv import DraftScratch, KVStore
from stages.loading import OpenedModel
from stages.placement import Placement
from stages.progress import SilentProgress
from stages.substitutes import quantize
from stages.weights import Weights
from tests import made

COMMON = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
CAPACITY, NODES = 1000, 41

needed = pytest.mark.skipif(COMPILED is None, reason="the compiled part is not there")


class Bench:
    """One model's layers, compiled and not, each with scratch of its own and the same past."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        resident: str = "",
        form: str = "int4",
        finer: str | None = None,
    ) -> None:
        """`finer`: the second layer's format."""
        self.opened, self.device = OpenedModel(directory), CpuDevice()
        shape = self.opened.shape
        kept = tuple(m.name for m in shape.matrices() if resident and resident in m.name)
        placement = Placement(
            kept, form, 2, 0, 64, 64, 1, 12, 16, finer=finer, raised=(1,) if finer else ()
        )
        with monkeypatch.context() as patch:
            # Fitted to these inputs, whose columns differ a lot, more codes would tip over.
            patch.setattr(weights, "quantize", lambda *given: quantize(*given[:3]))
            self.weights = Weights.load(self.device, self.opened, placement, SilentProgress())
        self.kv = KVStore(
            self.device, shape, places=2, capacity=CAPACITY, dtype=self.opened.dtype, poison=True
        )
        self.ours, self.scratch = self._stack()
        with monkeypatch.context() as patch:
            patch.setattr(compiled_layers, "COMPILED", None)
            self.torchs, self.torchs_scratch = self._stack()
        assert not self.torchs.compiled

    def _stack(self) -> tuple[DraftStack, DraftScratch]:
        skeleton, opened = self.opened.skeleton(), self.opened
        skeleton.bind({n: t for n, t in self.weights.resident.items() if n in skeleton})
        scratch = DraftScratch(self.device, opened.shape, rows=NODES, dtype=opened.dtype)
        scratch.block.fill_(math.nan)
        args = (skeleton, self.weights, opened.shape, opened.rope, self.kv, scratch)
        return DraftStack(*args), scratch

    def commit(self, rows: int) -> None:
        """Forget the past and make one of `rows` rows; what is behind it is NaN."""
        shape = self.opened.shape
        self.kv.reset(1)
        made_by = torch.Generator().manual_seed(rows)
        for layer in range(len(shape.layers)):
            size = (2, shape.kv_heads, rows, shape.head_dim)
            keys, values = torch.randn(size, generator=made_by, dtype=self.opened.dtype)
            self.kv.write(1, layer, 0, keys, values)
        self.kv.commit(1, range(rows))

    def compare(self, committed: int, parents: list[int], first: int) -> list[torch.Tensor]:
        """Run nodes from `first` on; how far off each row is, relative to the largest value."""
        size = (len(parents) - first, self.opened.shape.hidden)
        hidden = torch.randn(size, generator=torch.Generator().manual_seed(first))
        seen, positions = tree(parents, first, committed)
        if first == 0:
            for scratch in self._scratches():
                scratch.block.fill_(math.nan)
        theirs = self.torchs.run(hidden.clone(), 1, committed, seen, positions)
        ours = self.ours.run(hidden.clone(), 1, committed, seen, positions)
        pairs = [(ours, theirs)]
        mine, other = (s.block[..., first : len(parents), :] for s in self._scratches())
        pairs.append((mine.movedim(3, 0).flatten(1), other.movedim(3, 0).flatten(1)))
        for scratch in self._scratches():
            assert scratch.block[..., len(parents) :, :].isnan().all()
        return [(a - b).abs().amax(dim=1) / b.abs().amax() for a, b in pairs]

    def _scratches(self) -> tuple[DraftScratch, DraftScratch]:
        return self.scratch, self.torchs_scratch


def tree(parents: list[int], first: int, committed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """seen and positions of nodes from `first` on."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    positions = []
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
        positions.append(committed + int(seen[node].sum()) - 1)
    return seen[first:].clone(), torch.tensor(positions)


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of the architecture asked for, with what is asked for besides."""
    asked = request.param
    architecture, changed = asked if isinstance(asked, tuple) else (asked, {})
    # Keys of whole blocks of 64 rows, so that q, k and v are joined.
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    return made.make_model(
        tmp_path / "model", architecture, dtype=torch.float32, **sizes, **changed
    )


def assert_close(off: list[torch.Tensor], alike: float) -> None:
    """A share `alike` of rows is the same but for rounding, and all are nearly.

    Where rounding tips an activation's int8 code over, what comes after it changes by about
    1/127, and the more layers there are the more codes tip over.
    """
    every = torch.cat(off)
    assert every.isfinite().all()
    assert every.max() < 0.1
    assert every.quantile(alike) < 3e-6, every


def steps(bench: Bench, committed: int) -> list[torch.Tensor]:
    """Steps of one to eight rows of an odd tree, compared."""
    bench.commit(committed)
    parents: list[int] = []
    off: list[torch.Tensor] = []
    choose = random.Random(committed)
    for rows in (1, 4, 8, 2, 7, 3, 6, 5, 1):
        first = len(parents)
        # A row of a step may hang below an earlier one of the same step.
        parents += [choose.randrange(first + i) if first + i else -1 for i in range(rows)]
        off += bench.compare(committed, parents, first)
    return off


LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("mistral", {}),
    ("qwen2", {"max_window_layers": 1}),
    ("qwen2", {"max_window_layers": 0}),
    ("qwen3", {}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layer_interval": 1}),
    ("granite", {}),
]


@needed
@pytest.mark.parametrize(
    "directory", [(name, {"layers": 1, **more}) for name, more in LAYERS], indirect=True
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_compiled_layer_is_the_common_one(
    directory: Path, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory, monkeypatch)
    assert bench.ours.compiled
    compiled_part.plain(plain)
    try:
        off = [each for committed in (0, 1, 63, 64, 900) for each in steps(bench, committed)]
    finally:
        compiled_part.plain(False)
    assert_close(off, 0.9)


@needed
@pytest.mark.parametrize("directory", COMMON, indirect=True)
def test_compiled_layers_follow_each_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory, monkeypatch)
    assert bench.ours.compiled
    assert_close(steps(bench, 20), 0.5)


@needed
@pytest.mark.parametrize("directory", ["mistral", "qwen3"], indirect=True)
def test_what_a_row_does_not_see_may_be_nan(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory, monkeypatch)
    bench.commit(30)
    parents = [-1, 0, 0, 1, 2, 3, 5, 4]
    whole = torch.randn(8, bench.opened.shape.hidden, generator=torch.Generator().manual_seed(1))
    seen, positions = tree(parents, 0, 30)
    first = bench.ours.run(whole[:7].clone(), 1, 30, seen[:7, :7].clone(), positions[:7])
    assert first.isfinite().all()
    for node in (1, 3, 5, 6):
        bench.scratch.block[..., node, :] = math.nan
    if bench.torchs._fast[0].how.window == 8:  # mistral: also what the window hides is not read
        bench.kv.block(1)[..., : 30 + 3 - 8 + 1, :] = math.nan
    last = bench.ours.run(whole[7:].clone(), 1, 30, seen[7:].clone(), positions)
    assert last.isfinite().all()


@needed
@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_threads_change_nothing_but_rounding(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory, monkeypatch)
    bench.commit(900)
    parents = [-1, *range(39)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_close(bench.compare(900, parents, 0), 0.5)


@needed
@pytest.mark.parametrize("directory", ["llama", "qwen2"], indirect=True)
def test_layers_that_cannot_go_their_own_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory, monkeypatch, resident="layers.1.mlp")
    kinds = [type(part) for part in bench.ours._parts]
    assert kinds == [CompiledLayers, list, CompiledLayers]
    bench.commit(20)
    assert_close(bench.compare(20, [-1, 0, 1, 1, 0], 0), 0.5)


@pytest.mark.parametrize("directory", ["llama", "gemma2"], indirect=True)
def test_other_dtypes_and_shapes_are_not_taken(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[bytes | None] = []
    describe = draft_stack.describe

    def note(*args: object) -> bytes | None:
        described.append(describe(*args))  # type: ignore[arg-type]
        return described[-1]

    monkeypatch.setattr(draft_stack, "describe", note)
    monkeypatch.setattr(compiled_layers, "COMPILED", None)
    bench = Bench(directory, monkeypatch)
    assert not bench.ours.compiled
    assert not any(described)


@needed
@pytest.mark.parametrize("form", ["int8", "nf4", "int3", "int2"])
@pytest.mark.parametrize("directory", ["qwen2"], indirect=True)
def test_other_formats_are_taken_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    bench = Bench(directory, monkeypatch, form=form)
    assert bench.ours.compiled
    assert_close(steps(bench, 100), 0.5)


@needed
@pytest.mark.parametrize(("form", "finer"), PAIRS)
@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_layers_in_two_formats_are_one_call(
    directory: Path, monkeypatch: pytest.MonkeyPatch, form: str, finer: str
) -> None:
    bench = Bench(directory, monkeypatch, form=form, finer=finer)
    assert bench.ours.compiled and len(bench.ours._parts) == 1
    assert_close(steps(bench, 100), 0.5)


@needed
@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_step_needs_room_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(directory, monkeypatch)
    bench.commit(20)
    bench.compare(20, [-1, 0, 1, 1, 0, 0, 0, 0], 0)
    (part,) = bench.ours._parts
    assert isinstance(part, CompiledLayers)
    room = part._room.data_ptr()
    bench.compare(20, [-1, 0, 1], 0)
    assert part._room.data_ptr() == room


@needed
def test_the_module_refuses_what_is_no_step() -> None:
    for arguments in ((), (b"",), (b"", b""), (b"1", b"2"), (1, 2), (bytes(_LAYER.size), b"")):
        with pytest.raises((TypeError, ValueError)):
            compiled_part.draft_layers(*arguments)
    with pytest.raises((TypeError, ValueError)):
        compiled_part.draft_room(b"", 1)
