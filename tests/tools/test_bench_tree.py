"""Tree rules are compared fairly: equal draft time, the right walks, and a result for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline import OptionError
from routing.messages import Sampling
from stages.growth import Growth, Limits
from stages.loading import OpenedModel
from stages.progress import SilentProgress
from stages.tree import depths
from tests.made import make_model, make_prompt, make_tokenizer, reference_generate
from tools.bench import tree
from tools.bench.cli import run
from tools.bench.figures import Figure
from tools.bench.replay import Recorded, Replayed, Terms, add, replay
from tools.bench.tree import RULES, TreeChoice, make_rule, tree_limits
from tools.bench.tree_drafter import Replayer, TreeDrafter, as_step_times, measure_steps
from tools.bench.tree_rules import Levels
from tools.bench.tree_summary import rule_object, summarize
from tools.bench.tree_sweeps import SweepTimes
from tools.bench.tree_target import Target

VOCAB, PROMPT, NODES = 40, 3, 18
STEPS = as_step_times({1: 1.0, 2: 1.5, 4: 2.0, 6: 2.5, 8: 4.0})
TEXT = tuple((7 * index * index + 3 * index) % 23 for index in range(60))


class Scripted:
    """Drafts whose likeliest child is the recorded token, as if all that led there were right."""

    def run(self, growth: Growth, nodes: Sequence[int], temperature: float) -> None:
        """See Drafts."""
        growth.begin(nodes)
        scores = torch.zeros(len(nodes), VOCAB)
        for row, node in enumerate(nodes):
            place = growth.position + growth.depths[node] + 1
            scores[row, TEXT[place] if place < len(TEXT) else 0] = 6.0
        growth.extend(nodes, torch.log_softmax(scores / temperature, dim=1))

    def keep(self, rows: Sequence[int]) -> None:
        """See Drafts."""


def recorded(last: int = 40) -> Recorded:
    return Recorded("made", TEXT, PROMPT, last)


def terms(budget_s: float, nodes: int = NODES) -> Terms:
    return Terms(budget_s, 10.0, STEPS, tree_limits(nodes))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget_s", [0.5, 1.0, 2.9, 6.0, 11.0, 50.0])
def test_a_round_drafts_no_longer_than_it_may(name: str, budget_s: float) -> None:
    rule, drafts = make_rule(name, STEPS, "int8"), Scripted()
    rule.enter()
    for position in (PROMPT, PROMPT + 4, PROMPT + 9):
        kept = rule.begin(TEXT[: position + 1], position, tree_limits(NODES))
        drafts.keep(kept or [])
        spent = 0.0
        while nodes := rule.next(budget_s - spent):
            drafts.run(rule.growth, nodes, rule.temperature)
            spent += STEPS.of(len(nodes))
        assert spent <= budget_s
        tokens, parents = rule.tree()
        assert len(tokens) == len(parents) <= NODES + 1
        assert tokens[0] == TEXT[position]
        assert all(parent < node for node, parent in enumerate(parents))
        rule.end(spent + 10.0, 4)
        # What is left would not have paid for another step, or the tree is full.
        full = len(rule.growth.order) >= NODES or (name == "subspec" and len(tokens) > NODES)
        assert full or spent + STEPS.of(8) > budget_s or max(depths(parents)) == NODES


@pytest.mark.parametrize("name", RULES)
def test_a_drafter_that_is_right_yields_its_depth_and_one(name: str) -> None:
    done = replay(make_rule(name, STEPS, "int8"), Scripted(), recorded(), terms(6.0))
    assert done.draft_s / done.rounds <= 6.0
    if name == "chain":
        # Six steps of one node each give six levels, and every level is right.
        assert (done.rounds, done.tokens) == (6, 6 * 7)
        assert (done.steps, done.run, done.nodes) == (36, 36, 36)
    elif name == "subspec":
        # The root alone, then two levels of six: a step of the root costs 1, of a level 2.5.
        assert (done.rounds, done.tokens) == (10, 10 * 4)
        assert (done.steps, done.run, done.nodes) == (30, 130, 180)
    else:
        assert done.tokens / done.rounds > 3
    assert PROMPT + done.tokens >= 40


@pytest.mark.parametrize("name", RULES)
def test_a_drafter_that_is_wrong_yields_one_token_a_round(name: str) -> None:
    distinct = Recorded("made", tuple(range(39)), PROMPT, 20)

    class Wrong(Scripted):
        """Believes in one token that never comes."""

        def run(self, growth: Growth, nodes: Sequence[int], temperature: float) -> None:
            growth.begin(nodes)
            scores = torch.full((len(nodes), VOCAB), float("-inf"))
            scores[:, 39] = 0.0
            growth.extend(nodes, scores)

    done = replay(make_rule(name, STEPS, "int8"), Wrong(), distinct, terms(6.0))
    assert done.tokens == done.rounds == 20 - PROMPT
    assert done.nodes > 0


def test_a_round_ends_with_the_text() -> None:
    short = Recorded("made", TEXT[:8], PROMPT, 40)
    done = replay(make_rule("chain", STEPS, "int8"), Scripted(), short, terms(6.0))
    assert (done.rounds, done.tokens) == (1, 4)
    only = Recorded("made", TEXT[: PROMPT + 1], PROMPT, 40)
    assert replay(make_rule("chain", STEPS, "int8"), Scripted(), only, terms(6.0)) == Replayed()


def test_without_time_nothing_is_drafted() -> None:
    done = replay(make_rule("subspec", STEPS, "int8"), Scripted(), recorded(10), terms(0.9))
    assert (done.tokens, done.rounds, done.draft_s, done.nodes) == (7, 7, 0.0, 0)


def test_levels_keep_the_best_children_of_the_newest_level_only() -> None:
    rule = Levels(2, STEPS)
    rule.begin([5], 0, Limits(8, 8, 64))
    growth = rule.growth
    assert rule.next(9.0) == [0]
    growth.begin([0])
    growth.extend([0], torch.log(torch.tensor([[0.5, 0.3, 0.2]])))
    level = rule.next(9.0)
    assert [growth.tokens[node] for node in level] == [0, 1]
    growth.begin(level)
    growth.extend(level, torch.log(torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3]])))
    # 0.2 higher up is likelier than both 0.4 x 0.3 below, but stands on an older level.
    assert [growth.tokens[node] for node in rule.next(9.0)] == [0, 0]
    assert rule.next(0.1) == []
    assert rule.tree() == ((5, 0, 1, 0, 0), (-1, 0, 0, 1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tree") / "model"
    return make_tokenizer(make_model(directory, "llama", dtype=torch.float32))


def test_answers_are_the_targets_own_and_noise_in_the_scores_matters(model: Path) -> None:
    prompt = make_prompt(250, 9)
    hot = Sampling(1.0, 11)
    opened = OpenedModel(model)
    with Target(opened, 2, 64, SilentProgress()) as target:
        greedy, sampled = target.answer(prompt, [Sampling(), hot], 24, [])
        assert list(greedy[len(prompt) :]) == list(
            reference_generate(model, prompt, 24, torch.float32)
        )
        assert [target.kv.committed(place) for place in (0, 1)] == [len(greedy) - 1] * 2
        (alone,) = target.answer(prompt, [hot], 24, [])
        assert alone == sampled != greedy
        stop = greedy[len(prompt) + 2]
        (stopped,) = target.answer(prompt, [Sampling()], 24, [stop])
        assert stopped == greedy[: greedy.index(stop, len(prompt)) + 1]

        drafter = TreeDrafter(target, "int8", 8, 49, SilentProgress())
        target.answer(prompt, [hot], 24, [])
        found = {}
        one = Recorded("made", sampled, len(prompt), len(prompt) + 16)
        for noisy in (True, False):
            drafts = Replayer(drafter.model, target, 0, hot, noisy)
            rule = make_rule("chain", STEPS, "int8")
            found[noisy] = replay(rule, drafts, one, Terms(4.0, 9.0, STEPS, tree_limits(8)))
        # int8 drafts nearly know the target, but not which token it will draw without its noise.
        assert found[True].tokens / found[True].rounds > 1.5 * (
            found[False].tokens / found[False].rounds
        )
        times = measure_steps([drafter], sampled, 1)
        assert set(times["int8"]) == {1, 2, 4, 6, 8}
        assert all(seconds > 0 for seconds in times["int8"].values())
        drafter.close()
    opened.close()


def test_ratios_are_between_tokens_a_round() -> None:
    def arms(rounds: int) -> dict[str, dict[str, object]]:
        made = {"chain": 20, "subspec": 40, "ours": 60, "ours_no_noise": 30}
        whole = {n: add(Replayed(rounds, t, 5, 2, 4, 1.0), Replayed()) for n, t in made.items()}
        return {
            name: rule_object(one, {"a": one, "b": Replayed()}, terms(6.0), 0.5)
            for name, one in whole.items()
        }

    cold = {name: arm for name, arm in arms(10).items() if name != "ours_no_noise"}
    told = summarize({"int4": {"0": {"half": cold}, "1": {"half": arms(12)}}})["int4"]
    assert told["ours_over_chain"]["0"]["half"] == 3.0
    assert told["ours_over_subspec"]["1"]["half"] == 1.5
    assert told["noise_gain"] == {"1": {"half": 2.0}}
    assert told["sampled_over_greedy"]["1"]["half"] == pytest.approx(10 / 12)
    ours = cold["ours"]
    assert (ours["tau"], ours["nodes"], ours["draft_s"]) == (5.0, 0.5, 0.1)
    assert ours["tokens_per_s"] == pytest.approx(6 / 10.1)
    assert ours["prompts"] == {"a": 6.0, "b": None}
    nothing = rule_object(Replayed(), {}, terms(6.0), 0.5)
    assert nothing["tau"] is nothing["tokens_per_s"] is None
    empty = {"int4": {"1": {"half": dict.fromkeys(RULES, nothing)}}}
    assert summarize(empty)["int4"]["ours_over_chain"] == {"1": {"half": None}}


def test_choices_are_checked() -> None:
    assert TreeChoice.read("int8, int4", "0,0.70", 9) == TreeChoice(("int8", "int4"), (0, 0.7), 9)
    for forms, heats in (("int5", "0"), ("", "0"), ("int4", "hot"), ("int4", "-1"), ("int4", "")):
        with pytest.raises(OptionError):
            TreeChoice.read(forms, heats, 9)


def test_the_result_is_for_programs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swept(settings: object, forms: Sequence[str], *_: object) -> dict[str, SweepTimes]:
        return {form: SweepTimes(Figure(0.02, 0.01, 0.03), "plain", 1, None, 0.5) for form in forms}

    def timed(drafters: Sequence[TreeDrafter], *_: object) -> dict[str, dict[int, float]]:
        return {drafter.form: {1: 0.002, 8: 0.004} for drafter in drafters}

    monkeypatch.setattr(tree, "measure_sweeps", swept)
    monkeypatch.setattr(tree, "measure_steps", timed)
    out = tmp_path / "out.json"
    asked = ["--model", str(model), "--memory", "64MiB", "--link-gbps", "1", "--json", str(out)]
    more = ["--limit", "2", "-n", "8", "--formats", "int4,int8", "--nodes", "16"]
    assert run(["tree", *asked, *more, "--temperatures", "0,1"]) == 0
    result = json.loads(out.read_text())
    assert result.keys() >= {"what", "model", "memory", "machine", "versions", "arms", "summary"}
    assert result["what"] == "tree"
    assert result["machine"]["link_gbps"] == 0.5
    assert set(result["arms"]) == set(result["summary"]) == {"int4", "int8"}
    for heats in result["arms"].values():
        assert set(heats) == {"0", "1"}
        for heat, budgets in heats.items():
            assert set(budgets) == {"quarter", "half", "whole"}
            for rules in budgets.values():
                assert set(rules) == set(RULES if heat != "0" else RULES[:-1])
                for rule in rules.values():
                    assert rule.keys() >= {"tau", "nodes", "draft_s", "tokens_per_s"}
                    assert rule["draft_s"] <= rule["budget_s"] + 1e-9
                    assert rule["tau"] >= 0 and rule["nodes"] <= 16
    assert result["summary"]["int8"]["noise_gain"]["1"]["half"] > 0
