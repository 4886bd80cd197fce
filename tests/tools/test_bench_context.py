"""`context`: own keys and values are the drafter's of the same tokens, and both arms are fair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paceline import OptionError
from pipeline.settings import Settings
from routing.messages import Sampling
from stages.growth import Growth, Limits
from stages.loading import OpenedModel
from stages.progress import SilentProgress
from tests.made import make_model, make_prompt, make_tokenizer
from tools.bench import context
from tools.bench.cli import run
from tools.bench.context import ContextChoice
from tools.bench.context_prompts import choose_questions, context_prompts
from tools.bench.figures import Figure
from tools.bench.own_rows import OwnRows
from tools.bench.prompts import DEFAULT, Prompt, read_prompts
from tools.bench.replay import Recorded, Replayed, Terms, replay
from tools.bench.results import Options
from tools.bench.tree import BEYOND, asked_tokens, make_rule, tree_limits
from tools.bench.tree_drafter import Replayer, TreeDrafter, as_step_times
from tools.bench.tree_sweeps import SweepTimes
from tools.bench.tree_target import Target

STEPS = {1: 0.002, 8: 0.004}
LENGTHS, ANSWER, NODES, SWEEP_S = (24, 150), 16, 12, 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("context") / "model"
    return make_tokenizer(make_model(directory, "llama", dtype=torch.float32))


class Made(NamedTuple):
    """A target with the rows of `text` but for the last, and drafters of both kinds over them."""

    target: Target
    drafter: TreeDrafter
    own: OwnRows
    text: tuple[int, ...]


@pytest.fixture(params=["int8", "int2"])
def made(model: Path, request: pytest.FixtureRequest) -> Iterator[Made]:
    with ExitStack() as stack:
        opened = OpenedModel(model)
        stack.callback(opened.close)
        target = stack.enter_context(Target(opened, 1, 64, SilentProgress()))
        drafter = TreeDrafter(target, request.param, 40, 40, SilentProgress())
        stack.callback(drafter.close)
        own = OwnRows(target, drafter, 64, chunk=7)  # 7 does not divide the text
        stack.callback(own.close)
        (text,) = target.answer(make_prompt(250, 20), [Sampling()], 16, ())
        own.compute(text[:-1])
        yield Made(target, drafter, own, text)
        own.kv.check()


def rows(made: Made, store: str) -> torch.Tensor:
    kv = made.own.kv if store == "own" else made.target.kv
    assert kv.committed(0) == len(made.text) - 1
    return kv.block(0)[:, :, :, : len(made.text) - 1]


def test_own_rows_are_what_drafts_of_the_same_tokens_leave(made: Made) -> None:
    # A chain from the first token on, one node a step: other positions, masks and chunks.
    growth = Growth(made.text[0], 0, Limits(40, 40, 40))
    growth.guess(0, made.text[1:-1], -0.1)
    scorer = made.drafter.model.scorer(Sampling(), 0)
    path = [0, *growth.follow(made.text[1:-1])]
    assert len(path) == len(made.text) - 1
    with torch.no_grad():
        for node in path:
            made.drafter.model.run(0, growth, [node], scorer, (), 1.0)
    left = made.drafter._scratch.block[:, :, :, : len(path)]
    torch.testing.assert_close(rows(made, "own"), left, rtol=1e-3, atol=1e-3)


def drafts(made: Made, own: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The trees of rounds over each part of the answer."""
    model = made.own.model if own else made.drafter.model
    scorer = model.scorer(Sampling(), 0)
    found = []
    for position in range(20, len(made.text) - 1):
        growth = Growth(made.text[position], position, Limits(3, 8, 40))
        with torch.no_grad():
            model.run(0, growth, [0], scorer, (), 1.0)
            model.run(0, growth, growth.likeliest(4), scorer, (), 1.0)
        found.append(growth.tree())
    return found


def test_coarse_substitutes_draft_otherwise_over_their_own_rows(
    made: Made, request: pytest.FixtureRequest
) -> None:
    coarse = made.drafter.form == "int2"
    far = (rows(made, "own") - rows(made, "shared")).norm() / rows(made, "shared").norm()
    assert far > 0.3 if coarse else 0 < far < 0.05, far
    shared, own = drafts(made, own=False), drafts(made, own=True)
    same = sum(one == other for one, other in zip(shared, own, strict=True))
    assert same < len(shared) / 2 if coarse else same > 0, same


def test_another_text_takes_the_place_of_the_last(made: Made) -> None:
    before = rows(made, "own").clone()
    made.own.compute(make_prompt(250, 30))
    assert made.own.kv.committed(0) == 30
    made.own.compute(made.text[:-1])
    assert torch.equal(rows(made, "own"), before)


def test_a_prompt_ends_in_a_question_that_its_text_leaves_out(model: Path) -> None:
    opened, told = OpenedModel(model), read_prompts(DEFAULT, 9)
    opened.close()
    options = Options(Settings(model=str(model)), told, 8, repeats=2)
    prompts, text = context_prompts(opened, options, (300, 1000))
    assert [len(one.prompt) for one in prompts] == [300, 1000, 1000, 300]
    assert len({one.id for one in prompts}) == len({one.prompt for one in prompts}) == 4
    questions = choose_questions(told, 2)
    assert all(question.complexity != "low" for question in questions)
    asked = [tuple(tokens) for tokens in asked_tokens(opened, questions).values()]
    for number, prompt in enumerate(prompts):
        mine = asked[number // 2]
        assert prompt.prompt[-len(mine) :] == mine
        before = prompt.prompt[: -len(mine)]
        assert not any(mine == before[at : at + len(mine)] for at in range(len(before)))
    assert text > 300
    (short, _), _ = context_prompts(opened, options, (5,))
    assert short.prompt == asked[0][-5:]


def test_questions_are_none_of_the_lightest_where_there_are_others() -> None:
    def prompt(number: int, complexity: str) -> Prompt:
        return Prompt(str(number), "chat", complexity, "?")

    told = [prompt(0, "low"), prompt(1, "medium"), prompt(2, "low"), prompt(3, "high")]
    assert [one.id for one in choose_questions(told, 2)] == ["1", "3"]
    assert [one.id for one in choose_questions(told, 3)] == ["1", "1", "3"]
    assert [one.id for one in choose_questions(told[:1], 2)] == ["0", "0"]


def test_our_own_pace_ends_a_round_however_much_time_is_left() -> None:
    rules = {
        name: make_rule(name, as_step_times({1: 1.0, 8: 1.0}), "int8") for name in ("paced", "ours")
    }
    for rule in rules.values():
        rule.enter()
        rule.end(1.0, 1)  # a token a second, as much as a step of the root can add
        rule.begin([5, 6], 1, tree_limits(8))
    assert rules["paced"].next(100.0) == []
    assert rules["ours"].next(100.0) == [0]
    hasty = make_rule("paced", as_step_times({1: 1.0}), "int8")
    hasty.begin([5, 6], 1, tree_limits(8))
    assert hasty.next(0.5) == []
    assert hasty.next(1.0) == [0]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(drafters: Sequence[TreeDrafter], *_: object) -> dict[str, dict[int, float]]:
        return {drafter.form: STEPS for drafter in drafters}

    monkeypatch.setattr(context, "measure_steps", measure)


def replayed(model: Path, prompt: Sequence[int], own: bool) -> Replayed:
    """As `tree` replays one arm, but for the rule."""
    opened, most = OpenedModel(model), len(prompt) + ANSWER
    with Target(opened, 1, most + BEYOND, SilentProgress()) as target:
        limits = tree_limits(NODES)
        drafter = TreeDrafter(target, "int2", NODES, limits.rows, SilentProgress())
        (text,) = target.answer(prompt, [Sampling()], ANSWER + BEYOND, ())
        steps = as_step_times(STEPS)
        rule, kept = make_rule("paced", steps, "int2"), OwnRows(target, drafter, len(text))
        kept.compute(text[:-1])
        one = kept.model if own else drafter.model
        drafts = Replayer(one, target, 0, Sampling(), True)
        recorded = Recorded("made", text, len(prompt), most)
        for _ in range(2):
            done = replay(rule, drafts, recorded, Terms(1e9, SWEEP_S, steps, limits))
        kept.close()
        drafter.close()
    opened.close()
    return done


def test_the_result_is_for_programs(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    timed: None,
) -> None:
    asked: list[tuple[int, ...]] = []
    answer = Target.answer

    def heard(self: Target, prompt: Sequence[int], *more: Any) -> list[tuple[int, ...]]:
        asked.append(tuple(prompt))
        return answer(self, prompt, *more)

    monkeypatch.setattr(Target, "answer", heard)
    out = tmp_path / "out.json"
    options = ["-m", str(model), "--memory", "64MiB", "--link-gbps", "1", "--json", str(out)]
    options += ["--limit", "2", "-n", str(ANSWER), "--nodes", str(NODES), "--substitute", "int2"]
    lengths = ["--lengths", "24,150,500", "--sweep", str(SWEEP_S)]
    assert run(["context", *options, *lengths]) == 0
    prompts, asked = asked, []
    result = json.loads(out.read_text())
    assert result.keys() >= {"what", "model", "memory", "machine", "versions", "arms"}
    assert (result["what"], result["sweep_s"], result["sweeps"]) == ("context", SWEEP_S, {})
    assert tuple(map(len, prompts)) == LENGTHS
    assert result["lengths"].keys() == {"24", "150"}
    config = json.loads((model / "config.json").read_text())
    heads, dim = config["num_key_value_heads"], config["hidden_size"] // 4
    row = 2 * config["num_hidden_layers"] * heads * dim * 4
    for prompt in prompts:
        length = len(prompt)
        arms = result["lengths"][str(length)]
        assert result["step_times_s"][str(length)] == {str(n): s for n, s in STEPS.items()}
        assert [arms[name]["kv_bytes"] for name in ("shared", "own")] == [
            length * row,
            2 * length * row,
        ]
        assert (arms["shared"]["rows_s"], arms["own"]["rows_s"] > 0) == (0.0, True)
        for name, arm in arms.items():
            assert result["arms"][name][str(length)] == arm
            done = replayed(model, prompt, name == "own")
            assert done.rounds > 1
            assert (arm["rounds"], arm["tokens_per_round"]) == (
                done.rounds,
                done.tokens / done.rounds,
            )
            assert arm["tau"] == arm["tokens_per_round"] - 1
            assert arm["draft_step_s"] == pytest.approx(done.draft_s / done.steps)
            spent = done.draft_s + done.rounds * SWEEP_S
            assert arm["tokens_per_s"] == pytest.approx(done.tokens / spent)
        assert result["shared_over_own"][str(length)]["kv_bytes"] == 0.5
    assert result["skipped_lengths"].keys() == {"500"}
    said = " ".join(capsys.readouterr().out.split())
    assert "500 skipped" in said
    assert "longer prompts repeat them" in said


def test_a_sweep_is_the_engines_own_where_no_time_is_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: None
) -> None:
    def swept(settings: Settings, forms: Sequence[str], *_: object) -> dict[str, SweepTimes]:
        assert (settings.memory, settings.context) == (64 << 20, None)
        return {form: SweepTimes(Figure(0.3, 0.2, 0.4), "plain", 1, None, 0.5) for form in forms}

    monkeypatch.setattr(context, "measure_sweeps", swept)
    out = tmp_path / "out.json"
    options = ["-m", str(model), "--memory", "64MiB", "--link-gbps", "1", "--json", str(out)]
    assert run(["context", *options, "--limit", "3", "-n", "4", "--lengths", "20"]) == 0
    result = json.loads(out.read_text())
    assert (result["sweep_s"], result["machine"]["link_gbps"]) == (0.3, 0.5)
    assert result["sweeps"]["int4"]["sweep_s"] == [0.3, 0.2, 0.4]
    assert any("no room for drafts" in note for note in result["notes"])


def test_choices_are_checked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ContextChoice.read("9,5", "int8", 9, None) == ContextChoice((5, 9), "int8", 9, None)
    for lengths, form, sweep_s in (("0", "int4", 1.0), ("9", "int5", 1.0), ("9", "int4", 0.0)):
        with pytest.raises(OptionError):
            ContextChoice.read(lengths, form, 9, sweep_s)
    asked = ["-m", str(model), "--memory", "64MiB", "--link-gbps", "1", "--sweep", "1"]
    assert run(["context", *asked, "--lengths", "500", "-n", "16"]) == 2
    assert f"at most {512 - 16 - BEYOND} tokens" in capsys.readouterr().err.splitlines()[-1]
