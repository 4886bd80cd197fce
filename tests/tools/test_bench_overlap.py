"""`overlap` holds a round against its longest stage; only drafts that were of use count."""

from __future__ import annotations

import json
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import msgspec
import pytest

from pipeline.settings import Settings
from routing.trace import Span
from tests.tools.made_tiny import make_tiny
from tools.bench import arena, our_arm, overlap, turns
from tools.bench.arena import Arena
from tools.bench.cli import run
from tools.bench.groups import NoGroupError
from tools.bench.overlap import MEASURES, NOTES, OURS, WITHOUT, overlap_object, stages_of
from tools.bench.prompts import DEFAULT
from tools.bench.protocol import Ask, Job, Run
from tools.bench.rounds import Rounds, see_rounds
from tools.bench.running import make_options

KEYS = {
    "round_s",
    "stage_s",
    "overlap_ratio",
    "balance",
    "of_limit",
    "draft_ahead_gain",
    "draft_ahead_kept",
    "spread",
}


def spans_with_drafts_ahead(kept: int) -> list[Span]:
    """Two rounds; 4 s of 8 nodes ahead of the first verdict, `kept` of them kept, and 2 s in vain
    ahead of the second. In seconds."""
    return [
        Span("verify", "layer", 0.0, 1.0, sweep=1),
        Span("draft", "step", 2.0, 5.0, rows=4),
        Span("verify", "layer", 5.0, 7.0, sweep=2),
        Span("draft", "ahead", 5.0, 6.0, rows=4),
        Span("draft", "ahead", 6.0, 9.0, rows=4),
        Span("verify", "head", 9.0, 10.0, sweep=2),
        *([Span("draft", "keep", 11.0, 11.5, rows=kept)] if kept else []),
        Span("draft", "step", 12.0, 13.0, rows=2),
        Span("verify", "layer", 13.0, 14.0, sweep=3),
        Span("draft", "ahead", 13.0, 15.0, rows=4),
        Span("verify", "head", 15.0, 17.0, sweep=3),
    ]


@pytest.mark.parametrize(("kept", "useful"), [(0, 0.0), (2, 1.0), (8, 4.0)])
def test_what_was_drafted_ahead_counts_as_far_as_it_was_kept(kept: int, useful: float) -> None:
    rounds = see_rounds(spans_with_drafts_ahead(kept), 0.0, 20.0, 2)
    assert rounds is not None
    assert rounds.draft_s == pytest.approx(2.0)
    assert rounds.useful_draft_s == pytest.approx(2.0 + useful / 2)
    assert rounds.draft_step_s == pytest.approx(2.0)
    assert rounds.compute_s == pytest.approx(3.0)


def made_run(**more: Any) -> Run:
    """4 rounds of 1 s with 12 tokens; the link takes 0.8 s of each, drafts 0.5, verifying 0.2."""
    spans = Rounds(4, 0.9, 0.1, 0.5, 0.2, None, None, None)
    made = Run(13, (), 0.1, 4.0, 0, tau=2.0, rounds=4, spans=spans, ahead_kept=0.5)
    linked = {"bytes_per_sweep": 16 * 10**8, "raw_gbps": 2.0}
    return msgspec.structs.replace(made, **linked | more)


def test_a_round_is_held_against_its_longest_stage() -> None:
    one = made_run()
    assert stages_of(one) == {"link": 0.8, "draft": 0.5, "verify": 0.2}
    found = {key: measure(one) for key, measure in MEASURES.items()}
    assert found == pytest.approx(
        {
            "round_s": 1.0,
            "overlap_ratio": 1.25,
            "balance": 1.6,
            "of_limit": 3.0 / (3.0 / 0.8),
            "draft_ahead_kept": 0.5,
        }
    )


def test_without_a_stage_nothing_is_told_of_the_longest() -> None:
    for more in ({"raw_gbps": None}, {"spans": None}):
        made = overlap_object([msgspec.structs.replace(made_run(), **more)])
        assert made["round_s"] == 1.0
        assert made["overlap_ratio"] is made["balance"] is made["of_limit"] is None
    made = overlap_object([msgspec.structs.replace(made_run(), rounds=0, tau=None, spans=None)])
    assert made["round_s"] is None


def test_figures_are_medians_with_their_spread() -> None:
    made = overlap_object([made_run(), made_run(decode_s=6.0), made_run(raw_gbps=1.0)])
    assert (made["round_s"], made["spread"]["round_s"]) == (1.0, [1.0, 1.5])
    assert made["stage_s"] == {"link": 0.8, "draft": 0.5, "verify": 0.2}
    assert made["stage_spread"]["link"] == [0.8, 1.6]
    assert made["spread"]["overlap_ratio"] == pytest.approx([0.625, 1.875])


def test_arms_are_what_they_are_whatever_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAFT_AHEAD", "OVERLAP"):
        monkeypatch.setenv(f"PACELINE_{name}", "false")
    settings = make_options(None, "200MiB", DEFAULT, 1, 8, 0, 1).settings
    assert settings.draft_ahead and settings.overlap
    assert Settings.from_environment().overlap is False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return make_tiny(tmp_path_factory.mktemp("bench") / "model")


class Talk:
    """A Conversation between threads."""

    def __init__(self) -> None:
        self.asks: Queue[Ask | None] = Queue()
        self.replies: Queue[object] = Queue()

    def hear(self, kind: type[Ask]) -> Ask | None:
        """See Conversation."""
        return self.asks.get()

    def say(self, reply: object) -> None:
        """See Conversation."""
        self.replies.put(reply)


class WorkerHere:
    """An arm in a thread of this process, which has loaded torch: see Worker."""

    def __init__(self, job: Job, group: object = None) -> None:
        self._talk = Talk()
        act = our_arm.run_baseline if job.baseline else our_arm.serve
        self._thread = Thread(target=act, args=(job, self._talk))
        self._thread.start()

    def hear(self, kind: type[Any]) -> Any:
        """See Worker."""
        reply = self._talk.replies.get(timeout=60)
        assert isinstance(reply, kind)
        return reply

    def ask(self, ask: Ask) -> Any:
        """See Worker."""
        self._talk.asks.put(ask)
        return self.hear(Run)

    def group_peak(self) -> None:
        """Nobody counts."""

    def close(self) -> None:
        """See Worker."""
        self._talk.asks.put(None)
        self._thread.join(60)


def no_group(limit: int) -> None:
    raise NoGroupError("none here")


def test_overlap_measures_a_made_model(
    tiny: tuple[Path, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, budget = tiny
    for module in (arena, turns):
        monkeypatch.setattr(module, "Worker", WorkerHere)
    monkeypatch.setattr(turns, "MemoryGroup", no_group)
    out = tmp_path / "out.json"
    asked = ["--model", str(model), "--memory", str(budget), "--limit", "1", "--max-tokens", "12"]
    arms = ["--substitute", "int8", "--link-gbps", "0.5", "--json", str(out)]
    assert run(["overlap", *asked, *arms]) == 0
    result = json.loads(out.read_text())
    assert result["what"] == "overlap"
    assert result.keys() >= KEYS
    assert result["arms"].keys() == {OURS, WITHOUT}
    for arm in result["arms"].values():
        longest = max(arm["stage_s"].values())
        assert arm["stage_s"].keys() == set(overlap.STAGES)
        assert min(arm["stage_s"].values()) > 0
        assert arm["overlap_ratio"] == pytest.approx(arm["round_s"] / longest)
        assert arm["of_limit"] > 0
        assert arm["balance"] >= 1
        assert arm["rounds"] >= 1
    assert {key: result[key] for key in MEASURES} == {
        key: result["arms"][OURS][key] for key in MEASURES
    }
    assert result["arms"][WITHOUT]["draft_ahead_kept"] is None
    assert result["draft_ahead_gain"] > 0
    assert result["differing_prompts"] == []
    assert set(NOTES) <= set(result["notes"])
    assert "drafting ahead: " in capsys.readouterr().out


def test_where_all_is_resident_there_is_nothing_to_overlap(
    tiny: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before anything is measured."""

    def measured(*_: object) -> None:
        raise AssertionError("an arm was started")

    monkeypatch.setattr(Arena, "arm", measured)
    assert run(["overlap", "--model", str(tiny[0]), "--memory", "300MiB", "--link-gbps", "2"]) == 2
    assert "--memory" in capsys.readouterr().err
