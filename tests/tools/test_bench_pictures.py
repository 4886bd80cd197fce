"""Pictures show the figures of their results, with labels and units, and come out as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tests.test_layout import imports, modules
from tests.tools.made_results import (
    made_decode,
    made_link,
    made_links,
    made_overlap,
    made_results,
)
from tools.bench import needed
from tools.bench.cli import run
from tools.bench.document.benchmarks import BENCHMARKS
from tools.bench.pictures.arms import round_of
from tools.bench.pictures.drawing import PICTURES, draw, png

RESULTS = made_results()
ROOT = Path(__file__).resolve().parents[2]


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def caption(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def lines(axes: Axes) -> dict[str, list[float]]:
    """Label -> heights, of lines with a label (those with error bars carry it outside)."""
    handles, labels = axes.get_legend_handles_labels()
    found = {}
    for handle, label in zip(handles, labels, strict=True):
        line: Any = handle[0] if isinstance(handle, tuple) else handle
        found[label] = [float(y) for y in line.get_ydata()]
    return found


def errors(axes: Axes) -> list[tuple[float, float]]:
    """Lower and upper ends of all error bars."""
    segments = [s for c in axes.collections for s in c.get_segments()]  # type: ignore[attr-defined]
    return [(float(low[1]), float(high[1])) for low, high in segments]


@pytest.mark.parametrize("what", RESULTS)
def test_every_result_has_a_picture(what: str) -> None:
    figure = draw(RESULTS[what])
    assert figure.get_suptitle().startswith(f"{what}: ")
    assert "tiny" in figure.get_suptitle()
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert "Linux x86_64, 2 cores" in caption(figure)
    content = png(figure)
    assert content.startswith(b"\x89PNG")
    assert content == png(draw(RESULTS[what]))


def test_whatever_has_a_section_has_a_picture() -> None:
    assert PICTURES.keys() == BENCHMARKS.keys() == RESULTS.keys()


def test_arms_are_bars_with_their_spread_and_the_absent_are_named() -> None:
    figure = draw(made_decode())
    arms, _ = figure.axes
    assert (heights(arms), ticks(arms)) == ([6.0, 2.0], ["paceline", "plain"])
    assert texts(arms) == ["6.00", "2.00"]
    assert errors(arms) == [(5.0, 8.0), (1.5, 2.5)]
    assert arms.get_ylabel() == "tokens a second"
    assert "transformers has no bar: accelerate is not installed" in caption(figure)
    assert len(draw(made_decode("resident")).axes) == 1


def test_a_round_is_stacked_against_the_links_limit() -> None:
    _, stages = draw(made_decode()).axes
    assert heights(stages) == pytest.approx([400, 100, 200, 10])
    bottoms = [bar.get_y() for bar in stages.patches if isinstance(bar, Rectangle)]
    assert bottoms == pytest.approx([0, 400, 500, 700])
    (limit,) = stages.lines
    assert list(limit.get_ydata()) == pytest.approx([400, 400])
    assert stages.get_ylabel() == "milliseconds a round"
    labels = [text.get_text() for text in stages.get_legend().get_texts()]  # type: ignore[union-attr]
    assert "the link's limit, 400.0 ms" in labels


def test_what_a_round_hides_of_the_link_is_not_shown_as_sweep() -> None:
    arm = made_decode()["arms"]["paceline"] | {"sweep_s": 0.3, "commit_s": None}
    assert round_of(arm) == pytest.approx((0.2, 0.3, 0.0, 0.0, 0.4))
    assert round_of(arm | {"raw_gbps": None}) == (0.2, 0.0, 0.3, 0.0, None)
    assert round_of(made_decode()["arms"]["plain"]) is None
    without = made_decode()
    without["arms"]["paceline"]["sweep_s"] = None
    assert "no rounds" in texts(draw(without).axes[1])


def test_an_arm_without_a_figure_has_no_bar() -> None:
    result = made_decode()
    result["arms"]["plain"] |= {"tokens_per_s": None, "failed": "it broke"}
    figure = draw(result)
    assert ticks(figure.axes[0]) == ["paceline"]
    assert "plain has no bar: it broke" in caption(figure)


def test_the_link_is_two_bars() -> None:
    figure = draw(made_link())
    (axes,) = figure.axes
    assert heights(axes) == [1.2, 0.9]
    assert errors(axes) == [pytest.approx((1.0, 1.5)), pytest.approx((0.8, 1.0))]
    assert axes.get_ylabel() == "GB/s"
    assert axes.get_title() == "saturation 0.75 (0.70 - 0.80); 16.00 bits a weight streamed"
    assert "a note" in caption(figure)


def test_a_round_stands_beside_its_stages() -> None:
    result = made_overlap()
    figure = draw(result)
    ours, without = figure.axes
    assert ticks(ours) == ["link", "draft", "verify", "round"]
    assert heights(ours) == pytest.approx([400, 200, 100, 500])
    assert heights(without) == pytest.approx([400, 160, 100, 600])
    assert errors(ours)[0] == pytest.approx((350, 500))
    assert errors(ours)[3] == pytest.approx((450, 600))
    assert list(ours.lines[-1].get_ydata()) == pytest.approx([400, 400])
    assert ours.get_title() == "paceline: 1.25 x its longest stage"
    assert ours.get_ylim() == without.get_ylim()
    assert "drafting ahead: 1.20 x the tokens a second (1.10 - 1.30)" in caption(figure)
    unknown = {"stage_s": {**result["stage_s"], "link": None}, "overlap_ratio": None}
    result["arms"]["paceline"] |= unknown
    result["arms"]["no_ahead"] |= {"runs": [], "failed": "it broke"}
    result |= unknown | {"draft_ahead_gain": None}
    figure = draw(result)
    assert heights(figure.axes[0]) == pytest.approx([200, 100, 500])
    assert figure.axes[0].get_title() == "paceline"
    assert "no_ahead FAILED: it broke" in caption(figure)


def test_prefill_is_held_against_the_longer_of_compute_and_link() -> None:
    figure = draw(RESULTS["prefill"])
    (axes,) = figure.axes
    assert lines(axes) == {
        "time to the first token": [0.6, 2.5],
        "the longer of compute and one sweep's link": [0.5, 2.0],
    }
    assert (ticks(axes), axes.get_xlabel()) == (["32", "2,048"], "tokens of the prompt")
    assert "8000 skipped: beyond the context" in caption(figure)


def test_trees_have_axes_for_each_format_and_temperature() -> None:
    figure = draw(RESULTS["tree"])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"{f}, temperature {h}" for f in ("int4", "int8") for h in ("0", "1")]
    cold, warm = figure.axes[:2]
    assert heights(cold) == [3.0, 3.0, 5.0, 5.0]
    assert heights(warm) == [3.0, 3.0, 5.0, 5.0, 2.0, 2.0]
    assert ticks(warm) == ["half of a sweep", "whole of a sweep"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert warm.get_legend_handles_labels()[1] == ["chain", "ours", "ours_no_noise"]
    assert [axes.get_legend() is not None for axes in figure.axes] == [False, True, False, False]


def test_contexts_show_what_own_keys_and_values_yield_and_take() -> None:
    figure = draw(RESULTS["context"])
    tau, speed, kv = figure.axes
    shared, own = "the target's keys and values", "keys and values of the drafter's own"
    assert lines(tau) == {shared: [4.0, 4.0], own: [3.0, 1.5]}
    assert errors(tau) == [(3.5, 4.5), (3.5, 4.5), (2.5, 3.5), (1.0, 2.0)]
    assert lines(speed) == {shared: [10.0, 10.0], own: [8.0, 5.0]}
    assert lines(kv) == {shared: [512, 2048], own: [1024, 4096]}
    assert kv.get_ylabel() == "committed keys and values, MiB"
    assert (ticks(tau), tau.get_xlabel()) == (["512", "2,048"], "tokens of the prompt")
    assert "7000 skipped: beyond the context" in caption(figure)


def test_budgets_show_measured_and_predicted_and_name_the_steps() -> None:
    figure = draw(RESULTS["budgets"])
    speed, tau = figure.axes
    assert lines(speed) == {
        "ours, measured": [2.0, 6.0, 15.0],
        "ours, predicted": [4.0, 12.0, 30.0],
        "plain, measured": [2.0, 2.5, 15.0],
        "plain, predicted": [4.0, 5.0, 30.0],
    }
    assert texts(speed) == ["plain", "substitutes\nint4", "resident"]
    assert lines(tau)["tau"] == [0.0, 3.0, 0.0]
    assert (ticks(tau), tau.get_xlabel()) == (["100", "200", "700"], "memory budget, MiB")
    assert "900 MiB skipped" in caption(figure)


def test_links_show_where_speculation_pays() -> None:
    links = made_links()
    links["links"]["50"]["failed"] = {"plain": "it was killed"}
    figure = draw(links)
    assert "50 GB/s: plain FAILED: it was killed" in caption(figure)
    speed, gain = figure.axes
    assert speed.get_xscale() == gain.get_xscale() == "log"
    assert lines(gain)["ours over plain"] == pytest.approx([3.0, 1.2, 1.0])
    assert lines(gain)["no gain"] == [1.0, 1.0]
    assert ticks(gain) == ["0.5", "8", "50"]


@pytest.mark.parametrize("arguments", [["link", "--out", "out"], ["report", "x.json"]])
def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(needed, "find_spec", lambda name: None)
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install matplotlib" in line
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_loaded_for_pictures_alone() -> None:
    loads = [
        name
        for name, file in modules(ROOT).items()
        if not name.startswith("tools.bench.pictures")
        for _, target in imports(name, file, top_level=True)
        if target.startswith(("matplotlib", "tools.bench.pictures"))
    ]
    assert loads == []
    pyplot = [
        name
        for name, file in modules(ROOT).items()
        if any("pyplot" in target for _, target in imports(name, file))
    ]
    assert pyplot == []
