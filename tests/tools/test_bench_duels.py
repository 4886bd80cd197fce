"""`budgets` and `links`: figures of made-up answers, what is asked for, and an arm for real."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from msgspec import structs

from paceline import BudgetError, OptionError
from pipeline.memory import AvailableMemory
from pipeline.planner import plan, smallest_budget
from pipeline.settings import Settings
from routing.trace import Span
from stages.loading import OpenedModel
from tests.made import make_model, make_tokenizer
from tools.bench import budgets, duels, links, our_arm
from tools.bench.budgets import extremes, read_budgets, spread_budgets
from tools.bench.cli import run
from tools.bench.duels import Duel, duel_object
from tools.bench.links import read_links
from tools.bench.prompts import Prompt
from tools.bench.protocol import Ask, Baseline, Job, Kind, Loaded, PlanFacts, Run
from tools.bench.rounds import bytes_per_sweep
from tools.bench.shown import Shown
from tools.bench.turns import SLACK, Arm, Turn

MIB = 1 << 20
BUDGET_KEYS = {
    "step",
    "substitute",
    "predicted_tokens_per_s",
    "tokens_per_s",
    "tokens_per_round",
    "tau",
    "measured_over_predicted",
    "plain_tokens_per_s",
    "plain_predicted_tokens_per_s",
    "speedup_over_plain",
    "lossless",
}


def answered(decode_s: float, ids: tuple[int, ...] = (1,), tau: float = 0.0) -> Run:
    return Run(5, ids, 0.1, decode_s, 1 << 20, tau=tau, rounds=2)


def arm(kind: Kind, settings: Settings | None = None, step: str = "plain") -> Arm:
    made = Arm(
        Job(kind, settings or Settings(memory=MIB), "/nowhere"), Baseline(10), [], required=True
    )
    drafts = kind == "paceline"
    facts = PlanFacts(
        step="substitutes" if drafts else step,
        substitute="int4" if drafts else None,
        width=4,
        depth=4,
        resident_bytes=0,
        substituted_bytes=0,
        streamed_weights=1000,
        direct_reads=True,
        tokens_per_s=8.0 if drafts else 2.5,
    )
    made.loaded = Loaded("cpu", facts)
    return made


def turns(names: Sequence[str], **runs: tuple[Run, ...]) -> list[Turn]:
    return [
        Turn(0, Prompt(name, "chat", "low", name), {arm: of[place] for arm, of in runs.items()})
        for place, name in enumerate(names)
    ]


def test_a_duel_holds_measurements_against_plain_and_the_forecast() -> None:
    ours = (answered(1.0, tau=3.0), answered(0.5, ids=(2,), tau=4.0))
    found = turns("ab", paceline=ours, plain=(answered(2.0), answered(2.0)))
    made: Any = duel_object(Duel({"paceline": arm("paceline"), "plain": arm("plain")}, found))
    assert made.keys() >= BUDGET_KEYS
    assert (made["tokens_per_s"], made["spread"]["tokens_per_s"]) == (6.0, [4.0, 8.0])
    assert made["measured_over_predicted"] == 6.0 / 8.0
    assert made["spread"]["measured_over_predicted"] == [0.5, 1.0]
    assert (made["plain_tokens_per_s"], made["plain_predicted_tokens_per_s"]) == (2.0, 2.5)
    assert made["speedup_over_plain"] == 3.0
    assert (made["tau"], made["tokens_per_round"]) == (3.5, 4.5)
    assert (made["step"], made["substitute"]) == ("substitutes", "int4")
    assert (made["lossless"], made["differing_prompts"]) == (False, ["b"])


def test_an_arm_that_fails_at_one_setting_is_told_there() -> None:
    broken = arm("plain")
    broken.failed, broken.loaded = "it was killed", None
    duel = Duel(
        {"paceline": arm("paceline"), "plain": broken}, turns("a", paceline=(answered(1.0),))
    )
    made: Any = duel_object(duel)
    assert made["failed"] == {"plain": "it was killed"}
    assert made["tokens_per_s"] == 4.0
    assert made["plain_tokens_per_s"] is made["speedup_over_plain"] is made["lossless"] is None


def test_budgets_are_spread_by_a_factor_and_end_with_all() -> None:
    assert spread_budgets(10 * MIB, 160 * MIB, 5) == tuple(n * MIB for n in (10, 20, 40, 80, 160))
    assert spread_budgets(10 * MIB + 1, 10 * MIB + 2, 6) == (11 * MIB,)


def test_lists_are_read_rising_and_once() -> None:
    assert read_budgets("2MiB, 1MiB,1024KiB") == (MIB, 2 * MIB)
    assert read_budgets(None) is None
    assert read_links("8, 0.5,0.50") == (0.5, 8.0)


@pytest.mark.parametrize("text", ["", "0", "1MiB,lots", "1MiB;2MiB"])
def test_budgets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--budgets"):
        read_budgets(text)


@pytest.mark.parametrize("text", ["", "0", "1,-1", "fast", "inf", "nan"])
def test_links_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--gbps"):
        read_links(text)


def test_what_crosses_an_accelerators_link_is_its_copies() -> None:
    read = Span("disk", "layer 0", 0.0, 1.0, sweep=1, nbytes=9)
    copies = [Span("copy", "layer 0", 1.0, 2.0, sweep=sweep, nbytes=4) for sweep in (1, 2)]
    assert bytes_per_sweep([read]) == 9
    assert bytes_per_sweep([read, *copies]) == 4


def test_an_arm_may_hold_the_host_memory_behind_its_link() -> None:
    settings = Settings(memory=MIB, device="simulated", host_memory=3 * MIB)
    assert arm("paceline", settings).limit == 10 + MIB + 3 * MIB + SLACK


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OpenedModel]:
    """A made model with a tokenizer, of 14 MB: smaller ones fit wherever there are drafts."""
    sizes = {"layers": 6, "hidden_size": 256, "intermediate_size": 512}
    directory = tmp_path_factory.mktemp("duels") / "model"
    model = make_tokenizer(make_model(directory, "llama", dtype=torch.float32, **sizes))
    opened = OpenedModel(model)
    opened.close()
    return model, opened


def test_extremes_are_plain_streaming_and_all_of_the_model(tiny: tuple[Path, OpenedModel]) -> None:
    model, opened = tiny
    with Shown() as shown:
        smallest, everything = extremes(Settings(model=str(model)), shown)
    assert smallest == smallest_budget(opened.shape, context=512, substitute="none")
    assert plan(opened.shape, everything, 1.0, context=512).step == "resident"
    assert plan(opened.shape, smallest, 1.0, context=512).step == "plain"


class FakeArena:
    """An arena whose arms are never started; `asked` has the settings of each."""

    asked: ClassVar[list[tuple[str, Settings]]] = []
    step: ClassVar[str] = "plain"
    fails: ClassVar[set[tuple[str, int]]] = set()

    def __init__(self, settings: Settings, shown: object) -> None:
        self.settings = settings
        self.paths = list(Path(settings.model or "").glob("*.safetensors"))
        FakeArena.asked = []

    def __enter__(self) -> FakeArena:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to give back."""

    def arm(self, kind: Kind, *, settings: Settings) -> Arm:
        self.asked.append((kind, settings))
        made = arm(kind, settings, self.step)
        # As turns would find it; the fake ones take no notice.
        made.failed = "it was killed" if (kind, settings.memory) in self.fails else None
        return made


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(arms: Mapping[str, Arm], prompts: Sequence[Prompt], *_: object) -> list[Turn]:
        runs = {"paceline": answered(1.0, tau=3.0), "plain": answered(2.0)}
        runs = {name: run for name, run in runs.items() if not arms[name].failed}
        return [Turn(0, prompt, runs) for prompt in prompts]

    monkeypatch.setattr(budgets, "Arena", FakeArena)
    monkeypatch.setattr(links, "Arena", FakeArena)
    monkeypatch.setattr(duels, "take_turns", answer)


@pytest.mark.usefixtures("fakes")
def test_budgets_go_from_plain_streaming_to_all_that_the_machine_has(
    tiny: tuple[Path, OpenedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = 44 * MIB
    monkeypatch.setattr(budgets, "available_memory", lambda: AvailableMemory(free, free, "made"))
    asked = ["-m", str(tiny[0]), "--limit", "2", "--link-gbps", "2", "--out", str(tmp_path / "o")]
    assert run(["budgets", *asked]) == 0
    result = json.loads((tmp_path / "o" / "budgets.json").read_text())
    assert (tmp_path / "o" / "budgets.png").read_bytes().startswith(b"\x89PNG")
    assert (result["what"], result["memory"]) == ("budgets", None)
    keys = [int(key) for key in result["budgets"]]
    assert keys == sorted(keys)
    assert len(keys) > 2
    assert result["smallest_budget"] <= keys[0] < result["smallest_budget"] + MIB
    assert keys[-1] <= free < int(next(iter(result["skipped_budgets"])))
    kinds = [(kind, settings.memory) for kind, settings in FakeArena.asked]
    assert kinds == [(kind, key) for key in keys for kind in ("paceline", "plain")]
    assert all(one.keys() >= BUDGET_KEYS for one in result["budgets"].values())
    assert result["arms"]["paceline"].keys() == result["budgets"].keys()
    first = result["arms"]["paceline"][str(keys[0])]
    assert (first["predicted_tokens_per_s"], first["measured_over_predicted"]) == (8.0, 0.5)
    assert result["command"].startswith("python -m tools.bench budgets --model ")
    assert result["command"].endswith(" --limit 2 --link-gbps 2.0")
    shown = capsys.readouterr().out
    assert "skipped: only 44 MiB are free here" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("fakes")
def test_what_fails_at_one_budget_leaves_the_others(
    tiny: tuple[Path, OpenedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["-m", str(tiny[0]), "--limit", "1", "--link-gbps", "2", "--out", str(tmp_path)]
    command = ["budgets", *asked, "--budgets", "40MiB,44MiB"]
    monkeypatch.setattr(FakeArena, "fails", {("plain", 40 * MIB), ("paceline", 40 * MIB)})
    assert run(command) == 1
    first, second = json.loads((tmp_path / "budgets.json").read_text())["budgets"].values()
    assert first["failed"] == {"paceline": "it was killed", "plain": "it was killed"}
    assert (first["tokens_per_s"], second["tokens_per_s"], second["failed"]) == (None, 4.0, {})
    assert (tmp_path / "budgets.png").exists()
    assert "40 MiB: plain FAILED: it was killed" in " ".join(capsys.readouterr().out.split())
    to = tmp_path / "performance.md"
    assert run(["report", str(tmp_path / "budgets.json"), "--to", str(to)]) == 0
    assert f"- `budgets`, arm plain at {40 * MIB}: it was killed\n" in to.read_text()
    monkeypatch.setattr(FakeArena, "fails", {("paceline", n * MIB) for n in (40, 44)})
    assert run(command) == 1
    assert "it was killed" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("fakes")
def test_budgets_that_cannot_be_are_a_mistake(
    tiny: tuple[Path, OpenedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-m", str(tiny[0]), "--link-gbps", "2", "--budgets"]
    assert run(["budgets", *options, "1MiB,64MiB"]) == 2
    assert "--budgets" in capsys.readouterr().err.splitlines()[-1]
    assert run(["budgets", *options, "900000GB"]) == 2
    assert "what is free" in capsys.readouterr().err.splitlines()[-1]
    with Shown() as shown, pytest.raises(BudgetError):
        budgets.measure_budgets(_options(tiny[0]), (MIB,), shown)


def _options(model: Path) -> Any:
    from tools.bench.results import Options

    return Options(Settings(model=str(model), link_gbps=2.0), (), 8, 1)


@pytest.mark.usefixtures("fakes")
def test_links_that_nothing_would_cross_are_a_mistake(
    tiny: tuple[Path, OpenedModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["-m", str(tiny[0]), "--memory", "64MiB"]
    monkeypatch.setattr(FakeArena, "step", "resident")
    assert run(["links", *options]) == 2
    assert "nothing crosses a link" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(links, "available_memory", lambda: AvailableMemory(MIB, MIB, "made"))
    assert run(["links", *options]) == 2
    assert "less than the 1 MiB" in capsys.readouterr().err.splitlines()[-1]


class Talk:
    """A Conversation whose Asks are given and whose replies are kept."""

    def __init__(self, *asks: Ask) -> None:
        self._asks = list(asks)
        self.said: list[Any] = []

    def hear(self, kind: type[Ask]) -> Ask | None:
        return self._asks.pop(0) if self._asks else None

    def say(self, reply: Any) -> None:
        self.said.append(reply)


@pytest.mark.usefixtures("fakes")
def test_links_are_simulated_buses_to_host_memory_that_has_all(
    tiny: tuple[Path, OpenedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, opened = tiny
    budget = smallest_budget(opened.shape, context=512, substitute="none")
    asked = ["-m", str(model), "--memory", str(budget), "--limit", "2", "-n", "6"]
    assert run(["links", *asked, "--gbps", "8,0.05", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "links.json").read_text())
    assert (tmp_path / "links.png").exists()
    assert (result["what"], result["memory"]) == ("links", budget)
    assert list(result["links"]) == ["0.05", "8"]
    for key, one in result["links"].items():
        assert one.keys() >= BUDGET_KEYS
        assert (one["gbps"], one["speedup_over_plain"]) == (float(key), 2.0)
    said = capsys.readouterr().out
    assert "every link is simulated" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80
    assert [settings.link_gbps for _, settings in FakeArena.asked] == [0.05, 0.05, 8.0, 8.0]
    (settings,) = {settings for _, settings in FakeArena.asked if settings.link_gbps == 0.05}
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert settings.host_memory is not None
    assert settings.host_memory > size > 10_000_000

    # One of these arms for real: once all was read, the link's speed is what the bus has.
    talk = Talk(Ask("Hello", 3), Ask("What is it?", 6))
    ours = structs.replace(settings, model=str(model), substitute="none")
    our_arm.serve(Job("plain", ours, str(tmp_path)), talk)  # type: ignore[arg-type]
    loaded, _, answer = talk.said
    assert (loaded.device, loaded.plan.step) == ("simulated", "plain")
    assert loaded.plan.tokens_per_s > 0
    assert answer.raw_gbps is None
    assert 1_000_000 < answer.bytes_per_sweep < 15_000_000
    assert 0.02 < answer.spans.sweep_gbps <= 0.051
