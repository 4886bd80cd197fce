"""The benchmarks measure what they say: on spans and processes made for it, and once for real.

Speed is not tested here, only that figures are computed and reported rightly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from paceline import OptionError, PacelineError
from pipeline.settings import Settings
from routing.trace import Span
from stages import weights
from stages.formats import head_format, substitute_bytes
from stages.loading import OpenedModel
from stages.progress import SilentProgress
from stages.substitutes import Substitute, quantize
from tests.made import make_model, make_tokenizer
from tests.tools.made_tiny import make_tiny
from tools.bench import decode, draft_step, link, turns
from tools.bench.cli import run
from tools.bench.cut import write_cut
from tools.bench.decode import SEQUENTIAL_NOTE
from tools.bench.draft_step import NOTE, Products, measure_draft_step, summarize
from tools.bench.energy import EnergyMeter
from tools.bench.figures import Figure, differing, figure, ratio, roofline, saturation, speedup
from tools.bench.groups import MemoryGroup, NoGroupError
from tools.bench.prompts import DEFAULT, Prompt, read_prompts
from tools.bench.protocol import Ask, Baseline, Job, Loaded, PlanFacts
from tools.bench.protocol import Run as Answered
from tools.bench.results import Options
from tools.bench.rounds import bytes_per_sweep, see_rounds
from tools.bench.sizing import STEP, asked_tokens, sized
from tools.bench.target_rows import TargetRows
from tools.bench.tree_drafter import TreeDrafter
from tools.bench.turns import WARM_UP, Arm, Turn, take_turns
from tools.bench.workers import ArmError, Worker

SHARED_KEYS = {"what", "model", "memory", "machine", "versions", "arms"}
ARM_KEYS = {"tokens_per_s", "peak_memory_bytes", "energy_j_per_token"}
OUR_KEYS = {
    "tau",
    "tokens_per_round",
    "rounds",
    "draft_s",
    "sweep_s",
    "commit_s",
    "draft_step_s",
    "draft_step",
    "bytes_per_sweep",
    "speedup_over",
    "roofline",
    "lossless",
    "predicted_tokens_per_s",
    "measured_over_predicted",
}
STEP_KEYS = {
    "rows",
    "threads",
    "committed_rows",
    "step_s",
    "kernels_s",
    "byte_floor_s",
    "bytes",
    "memory_gbps",
    "over_kernels",
    "over_byte_floor",
    "spread",
}
LINK_KEYS = {"raw_gbps", "sweep_gbps", "saturation", "bits_per_weight_streamed"}


# --- Figures out of spans and answers. ---


def spans_of_an_answer() -> list[Span]:
    """A prompt's sweep at 0, then two rounds: draft, sweep, commit. Times in seconds."""
    made = [Span("verify", "layer", 0.0, 5.0, sweep=1)]
    for sweep, start in ((2, 10.0), (3, 20.0)):
        made += [
            Span("draft", "level", start, start + 1.0, session=0),
            Span("draft", "level", start + 1.0, start + 3.0, session=0),
            Span("verify", "begin", start + 3.0, start + 4.0, sweep=sweep),
            Span("verify", "head", start + 6.0, start + 8.0, sweep=sweep),
        ]
    made.append(Span("commit", "commit", 18.0, 18.5, session=0))
    # The second half of this one, and all of the next, come within the rounds' sweeps (13 to 28).
    made.append(Span("disk", "layer 0", 12.0, 14.0, sweep=1, nbytes=2_000_000_000))
    made.append(Span("disk", "layer 1", 20.0, 21.0, sweep=1, nbytes=2_000_000_000))
    made.append(Span("disk", "layer 0", 29.0, 30.0, sweep=2, nbytes=2_000_000_000))
    return made


def test_rounds_are_read_from_spans() -> None:
    rounds = see_rounds(spans_of_an_answer(), 0.0, 40.0, 2)
    assert rounds is not None
    assert rounds.count == 2
    assert rounds.sweep_s == pytest.approx(5.0)
    assert rounds.draft_s == pytest.approx(3.0)
    assert rounds.commit_s == pytest.approx(0.5)
    assert rounds.draft_step_s == pytest.approx(1.5)
    assert rounds.useful_draft_s == pytest.approx(3.0)
    assert rounds.compute_s == pytest.approx(3.0)
    assert rounds.sweep_gbps == pytest.approx(3 / 15)


def test_an_answer_sees_only_its_own_rounds() -> None:
    rounds = see_rounds(spans_of_an_answer(), 19.0, 40.0, 1)
    assert rounds is not None
    assert (rounds.draft_s, rounds.commit_s) == (pytest.approx(3.0), None)
    assert see_rounds(spans_of_an_answer(), 0.0, 40.0, 0) is None
    assert see_rounds([], 0.0, 40.0, 2) is None


def test_the_bytes_of_a_sweep_are_those_of_a_whole_one() -> None:
    assert bytes_per_sweep(spans_of_an_answer()) == 4_000_000_000
    assert bytes_per_sweep([]) is None


def answered(
    tokens: int = 5, decode_s: float = 2.0, ids: tuple[int, ...] = (), **more: Any
) -> Answered:
    return Answered(tokens, ids, 0.1, decode_s, 1 << 20, **more)


def turn(repeat: int = 0, prompt: str = "a", **runs: Answered) -> Turn:
    return Turn(repeat, Prompt(prompt, "chat", "low", prompt), runs)


def test_figures_have_medians_and_spreads_and_leave_out_what_was_not_measured() -> None:
    assert figure([3.0, None, 1.0, 2.0]) == Figure(2.0, 1.0, 3.0)
    assert figure([None]) is None
    assert ratio(1.0, None) is None
    assert ratio(1.0, 0.0) is None
    assert answered(tokens=1).tokens_per_s is None
    assert answered().tokens_per_s == 2.0


def test_the_roofline_is_what_the_link_would_allow() -> None:
    # 4 tokens a sweep of 1 GB over 2 GB/s: at most 8 tokens a second, and there were 2.
    run = answered(tau=3.0, rounds=1, bytes_per_sweep=10**9, raw_gbps=2.0)
    assert roofline(run) == pytest.approx(0.25)
    assert roofline(answered()) is None
    rounds = see_rounds(spans_of_an_answer(), 0.0, 40.0, 2)
    assert saturation(answered(spans=rounds, raw_gbps=0.4)) == pytest.approx(0.5)


def test_arms_are_compared_answer_by_answer() -> None:
    made = [
        turn(prompt="a", paceline=answered(decode_s=1.0, ids=(1,)), plain=answered(ids=(1,))),
        turn(prompt="b", paceline=answered(decode_s=0.5, ids=(1,)), plain=answered(ids=(2,))),
        turn(prompt="c", paceline=answered(decode_s=0.5, ids=(3,))),
    ]
    assert speedup(made, "paceline", "plain") == Figure(3.0, 2.0, 4.0)
    assert differing(made, "paceline", "plain") == ["b"]
    assert differing(made[2:], "paceline", "plain") is None


# --- Prompts, energy, groups, the cut. ---


def test_prompts_are_spread_over_the_file() -> None:
    prompts = read_prompts(DEFAULT, 10)
    assert len({prompt.id for prompt in prompts}) == 10
    assert len({prompt.category for prompt in prompts}) >= 6
    assert len(read_prompts(DEFAULT, 1000)) == len(read_prompts(DEFAULT, None)) == 40


def test_the_context_is_what_the_longest_prompt_and_answer_need(tmp_path: Path) -> None:
    model, _ = make_tiny(tmp_path / "model")
    asked = (Prompt("a", "chat", "low", "one"), Prompt("b", "chat", "low", "two words " * 9))

    def context(max_tokens: int, **given: object) -> int | None:
        settings = Settings.from_environment({}, model=str(model), **given)
        return sized(Options(settings, asked, max_tokens, 1), SilentProgress()).settings.context

    opened = OpenedModel(model)
    longest = max(map(len, asked_tokens(opened, asked).values()))
    opened.close()
    assert longest > 9 and context(2 * STEP - longest) == 2 * STEP
    assert context(2 * STEP - longest + 1) == 3 * STEP
    assert context(10_000) == opened.shape.max_positions
    assert context(8, context=200) == 200


def test_a_context_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    settings = Settings.from_environment({}, model=str(model))
    with pytest.raises(OptionError, match="a model with a tokenizer"):
        sized(Options(settings, (Prompt("a", "chat", "low", "one"),), 8, 1), SilentProgress())


@pytest.mark.parametrize("text", ["", '{"id": "a"}', "no JSON", "\x00"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(OptionError, match="--prompts"):
        read_prompts(tmp_path / "p", 3)


def test_energy_is_the_packages_and_survives_a_counter_that_wraps(tmp_path: Path) -> None:
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "psys"}
    for zone, name in zones.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text("9000000\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("10000000\n")
    meter = EnergyMeter(tmp_path)
    assert meter.joules() is None  # not started
    meter.start()
    for zone in zones:
        (tmp_path / zone / "energy_uj").write_text("2000000\n")
    assert meter.joules() == pytest.approx(3.0)
    absent = EnergyMeter(tmp_path / "absent")
    absent.start()
    assert absent.joules() is None


def test_where_no_group_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoGroupError, match="no hierarchy"):
        MemoryGroup(1 << 20, tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    missing = tmp_path / "missing"
    with pytest.raises(NoGroupError):
        MemoryGroup(1 << 20, missing)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A real group of 64 MiB; the test is skipped where there can be none."""
    try:
        made = MemoryGroup(64 << 20)
    except NoGroupError as error:
        pytest.skip(str(error))
    yield made
    made.close()
    assert not made.folder.exists()


def test_a_group_limits_its_process_and_tells_its_peak(group: MemoryGroup) -> None:
    for mebibytes, ended in ((32, 0), (128, -9)):
        code = (
            "import sys; from pathlib import Path; from tools.bench.groups import join;"
            "join(Path(sys.argv[1])); bytearray(int(sys.argv[2]) << 20)"
        )
        command = [sys.executable, "-c", code, str(group.folder), str(mebibytes)]
        assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == ended
    peak = group.peak()
    assert peak is None or 32 << 20 <= peak <= 64 << 20


def job(kind: str = "plain", memory: int = 1 << 20) -> Job:
    return Job(kind, Settings(model="none/such", memory=memory), "/nowhere")  # type: ignore[arg-type]


def test_an_arm_that_is_killed_by_its_limit_says_so(group: MemoryGroup) -> None:
    worker = Worker(job(), group)
    try:
        with pytest.raises(ArmError, match="needed more than its limit of 64 MiB"):
            worker.hear(Loaded)
    finally:
        worker.close()
    assert not group.folder.exists()


def test_an_arm_that_dies_leaves_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.workers._environment", lambda: {"PYTHONHOME": "/nowhere"})
    worker = Worker(job())
    try:
        with pytest.raises(ArmError, match=r"Arm plain ended with status 1: .+"):
            worker.ask(Ask("Hello", 4))
    finally:
        worker.close()
        worker.close()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "smollm3"])
def test_a_cut_is_the_same_kind_of_model_with_one_layer(tmp_path: Path, architecture: str) -> None:
    model, cut = tmp_path / "model", tmp_path / "cut"
    make_tokenizer(make_model(model, architecture, dtype=torch.float32))
    cut.mkdir()
    opened = OpenedModel(model)
    write_cut(opened, cut)
    opened.close()
    found = OpenedModel(cut)
    found.close()
    assert found.shape.layers == opened.shape.layers[:1]
    assert (found.shape.vocab, found.dtype) == (opened.shape.vocab, opened.dtype)
    assert (cut / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


# --- Turns, with processes that are made up. ---


class FakeWorker:
    """Stands in for an arm's process; `log` has everything that was asked of any."""

    log: ClassVar[list[str]] = []
    open: ClassVar[set[int]] = set()
    breaks: ClassVar[str | None] = None

    def __init__(self, job: Job, group: object) -> None:
        self.kind = job.kind
        self.open.add(id(self))

    def hear(self, kind: type[Loaded]) -> Loaded:
        self.log.append(f"{self.kind} loads")
        return Loaded("cpu")

    def ask(self, ask: Ask) -> Answered:
        self.log.append(f"{self.kind} {'warms up' if ask == WARM_UP else ask.prompt}")
        if self.breaks == self.kind and ask != WARM_UP:
            raise ArmError("it broke")
        return answered()

    def group_peak(self) -> int:
        return 5

    def close(self) -> None:
        self.open.discard(id(self))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    def no_group(limit: int) -> None:
        raise NoGroupError("none here")

    monkeypatch.setattr(turns, "Worker", FakeWorker)
    monkeypatch.setattr(turns, "MemoryGroup", no_group)
    monkeypatch.setattr(FakeWorker, "log", [])
    monkeypatch.setattr(FakeWorker, "open", set())
    return FakeWorker


def fake_arms(memory: int = 1 << 20) -> dict[str, Arm]:
    return {
        kind: Arm(job(kind, memory), Baseline(10), [], required=kind == "paceline")
        for kind in ("paceline", "plain")
    }


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(name, "chat", "low", name) for name in names]


def tell(what: str) -> None:
    """Nobody listens."""


def test_arms_take_turns_and_repeats_begin_at_other_prompts(fake: type[FakeWorker]) -> None:
    arms = fake_arms()
    done = take_turns(arms, prompts("a", "b"), 2, 8, tell)
    assert [(one.repeat, one.prompt.id) for one in done] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert all(set(one.runs) == {"paceline", "plain"} for one in done)
    mine = [line.split(" ", 1)[1] for line in fake.log if line.startswith("plain")]
    # The same prompt never comes twice in a row: the warm-up stands between.
    assert mine == ["loads", "warms up", "a", "b", "warms up", "b", "a"]
    answers = [line for line in fake.log if line.endswith((" a", " b"))]
    assert [line.split()[0] for line in answers] == ["paceline", "plain"] * 4
    assert not fake.open
    assert arms["plain"].group_peak == 5
    assert arms["plain"].notes == {"memory not limited by the kernel: none here"}


def test_arms_that_do_not_fit_together_are_started_for_each_turn(fake: type[FakeWorker]) -> None:
    take_turns(fake_arms(memory=1 << 50), prompts("a", "b"), 1, 8, tell)
    assert fake.log == [
        line
        for prompt in ("a", "b")
        for kind in ("paceline", "plain")
        for line in (f"{kind} loads", f"{kind} warms up", f"{kind} {prompt}")
    ]
    assert not fake.open


def test_an_arm_beside_ours_may_fail(
    fake: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "breaks", "plain")
    arms = fake_arms()
    done = take_turns(arms, prompts("a", "b"), 1, 8, tell)
    assert [set(one.runs) for one in done] == [{"paceline"}, {"paceline"}]
    assert arms["plain"].failed == "it broke"
    assert fake.log.count("plain a") == 1
    assert "plain b" not in fake.log
    assert not fake.open


@pytest.mark.parametrize("error", [ArmError, KeyboardInterrupt])
def test_whatever_ends_the_turns_no_process_is_left(
    fake: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(self: FakeWorker, ask: Ask) -> Answered:
        raise error

    monkeypatch.setattr(fake, "ask", broken)
    with pytest.raises(error):
        take_turns(fake_arms(), prompts("a"), 1, 8, tell)
    assert not fake.open


# --- Results. ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--memory", "lots"], "--memory"),
        (["decode", "--memory", "1KiB"], "MiB"),
        (["decode", "--repeats", "0"], "--repeats"),
        (["decode", "--max-tokens", "-3"], "--max-tokens"),
        (["decode", "--arms", "plain,best"], "--arms"),
        (["decode", "--substitute", "int1"], "--substitute"),
        (["decode", "--json", "no/such/folder/out.json"], "--json"),
        (["decode", "--out", "constraints.txt"], "--out"),
        (["decode", "--prompts", "no/such.jsonl"], "--prompts"),
        (["decode", "--model", "./no/such/model"], "no/such/model"),
        (["link", "--link-gbps", "0"], "--link-gbps"),
        (["link", "--faster"], "--faster"),
        (["fly"], "fly"),
    ],
)
def test_a_mistake_is_one_line(
    tiny: tuple[Path, int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    if "--model" not in arguments and arguments != ["fly"]:
        arguments = [*arguments, "--model", str(tiny[0])]
    assert run(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert "Traceback" not in "\n".join(lines)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return make_tiny(tmp_path_factory.mktemp("bench") / "model")


@pytest.mark.timeout(600)  # three processes that import torch, on a machine that may be busy
def test_decode_measures_a_made_model(
    tiny: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, budget = tiny
    out = tmp_path / "out.json"
    asked = ["--model", str(model), "--memory", str(budget), "--limit", "1", "--max-tokens", "8"]
    arms = [
        "--arms",
        "paceline,sequential,plain,transformers",
        "--substitute",
        "int8",
        "--link-gbps",
        "2",
    ]
    assert run(["decode", *asked, *arms, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result.keys() >= SHARED_KEYS | {"speedup_over", "roofline", "lossless"}
    assert result["arms"].keys() == set(decode.ARMS)
    assert all(arm.keys() >= ARM_KEYS for arm in result["arms"].values())
    paceline, sequential, plain = (result["arms"][name] for name in decode.ARMS[:3])
    assert paceline.keys() >= OUR_KEYS
    assert (result["what"], result["memory"]) == ("decode", budget)
    assert result["lossless"] is True
    assert result["speedup_over"].keys() == set(decode.ARMS) - {"paceline"}
    for arm in (paceline, sequential, plain):
        assert arm["tokens_per_s"] > 0
        assert 1_000_000 < arm["bytes_per_sweep"] < 15_000_000
        assert arm["sweep_s"] > 0
        assert 0 < arm["raw_gbps"] <= 2.5
        assert arm["peak_memory_bytes"] <= budget
        forecast = arm["tokens_per_s"] / arm["predicted_tokens_per_s"]
        assert arm["measured_over_predicted"] == pytest.approx(forecast)
    assert paceline["plan"]["substitute"] == "int8"
    assert paceline["draft_step_s"] > 0
    assert paceline["tokens_per_round"] == paceline["tau"] + 1
    assert (plain["tau"], plain["draft_s"], plain["draft_step_s"]) == (0, 0, None)
    step = paceline["draft_step"]
    assert result["draft_step"] == step
    assert step.keys() == STEP_KEYS
    assert NOTE in result["notes"]
    assert "simulated" in result["arms"]["transformers"]["skipped"]
    assert "not asked for" in result["arms"]["llamacpp"]["skipped"]
    assert result["speedup_over"]["sequential"] > 0
    assert sequential["plan"]["substitute"] == "int8"
    assert SEQUENTIAL_NOTE in result["notes"]
    assert "the link is simulated: 2 GB/s" in result["notes"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "lossless: paceline's tokens are plain's" in shown
    over = f"{step['over_kernels']:.2f} x its products alone, {step['over_byte_floor']:.1f} x"
    assert f"draft step of 4 rows: {step['step_s'] * 1e3:.1f} ms, {over} reading" in shown
    assert not list(tmp_path.glob(".*"))


# --- The draft step. ---


class Counted:
    """A substitute that says how many rows it was multiplied by."""

    compiled = None

    def __init__(self, whole: Substitute, number: int, seen: list[tuple[int, int, int]]) -> None:
        self._whole, self._number, self._seen = whole, number, seen
        self.nbytes = whole.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See Substitute."""
        self._seen.append((self._number, *x.shape))
        return self._whole.matmul(x)

    def dequantize(self) -> torch.Tensor:
        """See Substitute."""
        return self._whole.dequantize()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_model(tmp_path / "small", "llama", dtype=torch.float32)


def plan_facts(step: str = "substitutes", substitute: str | None = "int8") -> PlanFacts:
    return PlanFacts(step, substitute, 4, 4, 0, 0, 2 * 10**9, True)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_draft_step_is_compared_with_its_products_and_their_bytes(
    small: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(draft_step, "measure_read", lambda: 2.0)
    threads = torch.get_num_threads()
    step = measure_draft_step(small, plan_facts(substitute=form), SilentProgress())
    assert torch.get_num_threads() == threads
    assert step is not None
    opened = OpenedModel(small)
    opened.close()
    head = opened.shape.head
    nbytes = [substitute_bytes((m.rows, m.cols), form) for m in opened.shape.matrices()]
    assert step.bytes == sum(nbytes) + substitute_bytes((head.rows, head.cols), head_format(form))
    assert (step.rows, step.committed_rows) == (4, 100)
    assert step.threads == 1
    assert step.step_s > 0
    assert step.kernels_s > 0
    assert step.byte_floor_s == pytest.approx(step.bytes / 2e9)
    assert step.over_kernels == pytest.approx(step.step_s / step.kernels_s)
    assert step.over_byte_floor == pytest.approx(step.step_s / step.byte_floor_s)
    assert step.spread[0] <= step.over_kernels <= step.spread[1]


def test_a_draft_step_is_told_in_medians() -> None:
    step = summarize([(2.0, 1.0), (9.0, 3.0), (4.0, 4.0)], 90, 6 * 10**9, 2.0)
    assert (step.step_s, step.kernels_s, step.byte_floor_s) == (4.0, 3.0, 3.0)
    assert step.over_kernels == step.over_byte_floor == pytest.approx(4 / 3)
    assert step.spread == (1.0, 3.0)


def test_a_step_and_its_products_take_the_same_substitutes(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    made: list[Counted] = []

    def counted(*given: Any) -> Counted:
        made.append(Counted(quantize(*given), len(made), seen))
        return made[-1]

    monkeypatch.setattr(weights, "quantize", counted)
    opened = OpenedModel(small)
    with TargetRows(opened, 1, 16) as target:
        drafter = TreeDrafter(target, "int8", 8, 8, SilentProgress())
        drafter.time_steps([0], 4)
        step = sorted(product for product in seen if product[1] == 4)
        seen.clear()
        products = Products(drafter.substitutes, opened.shape, 4, opened.dtype)
        products.time()
        assert sorted(seen) == step
        assert [number for number, *_ in step] == list(range(len(made)))
        assert products.nbytes == sum(one.nbytes for one in made)
        drafter.close()
    opened.close()


@pytest.mark.parametrize("plan", [None, plan_facts("plain", None), plan_facts("resident", None)])
def test_without_drafts_there_is_no_draft_step(plan: PlanFacts | None) -> None:
    assert measure_draft_step(Path("/no/such/model"), plan, SilentProgress()) is None


def test_decode_tells_that_there_was_no_draft_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "Arena", FakeArena)
    monkeypatch.setattr(decode, "take_turns", lambda *_: [turn(paceline=answered())])
    out = tmp_path / "out.json"
    asked = ["--arms", "paceline", "--substitute", "none", "--json", str(out)]
    assert run(["decode", *asked]) == 0
    result = json.loads(out.read_text())
    assert result["draft_step"] is result["arms"]["paceline"]["draft_step"] is None
    assert "draft step of" not in capsys.readouterr().out


class FakeArena:
    """An arena whose only arm is never started."""

    def __init__(self, settings: Settings, shown: object, gguf: object = None) -> None:
        self.settings = settings

    def __enter__(self) -> FakeArena:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to give back."""

    def missing(self, kind: str) -> None:
        """Nothing is."""

    def arm(self, kind: str, *, required: bool) -> Arm:
        made = Arm(job(), Baseline(10), [], required=required)
        made.loaded = Loaded("cpu", plan_facts("plain", None))
        return made


def test_link_compares_sweeps_with_plain_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = see_rounds(spans_of_an_answer(), 0.0, 40.0, 2)
    run_ = answered(spans=rounds, raw_gbps=0.25, bytes_per_sweep=4 * 10**9, rounds=2, tau=0.0)
    monkeypatch.setattr(link, "Arena", FakeArena)
    monkeypatch.setattr(link, "take_turns", lambda *_: [turn(plain=run_)])
    out = tmp_path / "out.json"
    folder = tmp_path / "new" / "folder"
    assert run(["link", "--json", str(out), "--out", str(folder), "--limit", "2"]) == 0
    result = json.loads(out.read_text())
    assert result["command"] == "python -m tools.bench link --limit 2"
    assert {file.name for file in folder.iterdir()} == {"link.json", "link.png"}
    assert json.loads((folder / "link.json").read_text()) == result
    assert result.keys() >= SHARED_KEYS | LINK_KEYS
    assert result["raw_gbps"] == result["machine"]["link_gbps"] == 0.25
    assert result["sweep_gbps"] == pytest.approx(0.2)
    assert result["saturation"] == pytest.approx(0.8)
    assert result["bits_per_weight_streamed"] == pytest.approx(16.0)


def test_errors_of_arms_are_of_our_tree() -> None:
    assert issubclass(ArmError, PacelineError)
