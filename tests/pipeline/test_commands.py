"""What the commands print, and that every mistake is one line."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from huggingface_hub import constants

from pipeline import arguments, commands
from pipeline.options import NAMES
from pipeline.settings import Settings
from routing.errors import EngineError, OptionError
from stages.safetensors_writer import SafetensorsWriter
from stages.tokenizer import Tokenizer
from stages.weights import Weights
from tests.made import make_model, make_tokenizer, reference_generate
from tests.pipeline.made_cli import Here, Outcome
from tests.stages.made_gguf import MadeGguf

SMALL = ("-c", "64", "--memory", "28000KiB", "--link-gbps", "4")
"""A budget in which most of the model is streamed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    return make_tokenizer(make_model(path, "llama", dtype=torch.float32))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


@pytest.fixture
def here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Here:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Here(capsys)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def load(*_: object) -> NoReturn:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Weights, "load", load)


def loads(done: Outcome) -> dict[str, Any]:
    """The one JSON object that was printed; nothing else may have been."""
    assert done.code == 0 and done.err == "", done
    assert done.out.endswith("}\n") and done.out.count("\n") == 1
    found: dict[str, Any] = json.loads(done.out)
    return found


# --- generate ---


def test_an_answer_and_its_tables(here: Here, model: Path) -> None:
    done = here("generate", "hello", "-m", model, "-n", "12", *SMALL, "--substitute", "int8")
    assert done.code == 0
    plain = loads(here("generate", "hello", "-m", model, "-n", "12", *SMALL, "--json"))
    assert done.out == plain["answer"]["text"] + "\n"
    for words in ("Plan: ", "resident weights", "substitutes (", "streamed weights, each sweep"):
        assert words in done.err
    for words in ("tau (accepted", "tokens a round (tau + 1)", "tokens a second after it", "seed"):
        assert words in done.err
    for words in ("p50 ms", "p99 ms", "busy", "GB/s", "disk", "verify", "saturation of the link"):
        assert words in done.err
    assert done.err.startswith("Loading weights: ")


def test_an_answer_as_json(here: Here, model: Path) -> None:
    told = loads(here("generate", "hello", "-m", model, "-n", "6", *SMALL, "--json"))
    assert set(told) == {"answer", "plan", "stages", "link"}
    tokenizer = Tokenizer.load(model)
    assert tokenizer is not None
    prompt = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert told["answer"]["token_ids"] == reference_generate(model, prompt, 6)
    assert told["answer"]["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 6}
    link = told["link"]
    assert link["measured_gbps"] == 4.0 and link["nbytes"] > 0
    assert link["saturation"] == pytest.approx(link["reached_gbps"] / 4.0)
    assert told["stages"]["disk"]["p99_s"] >= told["stages"]["disk"]["p50_s"] > 0


def test_a_seed_is_drawn_told_and_repeats(here: Here, model: Path) -> None:
    ask = ("generate", "hello", "-m", model, "-n", "12", "--temp", "1.5", "--json")
    first, second = (loads(here(*ask))["answer"] for _ in range(2))
    assert first["seed"] != second["seed"]
    again = loads(here(*ask, "-s", str(first["seed"])))["answer"]
    assert again["token_ids"] == first["token_ids"]


def test_a_raw_prompt_goes_around_the_template(here: Here, model: Path) -> None:
    told = loads(here("generate", "hello", "-m", model, "-n", "2", "--raw", "--json"))
    assert told["answer"]["usage"]["prompt_tokens"] == 5


def test_a_model_without_a_template_continues(here: Here, copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    told = loads(here("generate", "hello", "-m", copy, "-n", "2", "--json"))
    assert told["answer"]["usage"]["prompt_tokens"] == 5


def test_a_prompt_from_standard_input(
    here: Here, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    piped = loads(here("generate", "-", "-m", model, "-n", "3", "--json"))["answer"]
    given = loads(here("generate", "hello", "-m", model, "-n", "3", "--json"))["answer"]
    assert piped["token_ids"] == given["token_ids"]


def test_the_simulated_accelerator(here: Here, model: Path) -> None:
    told = loads(
        here("generate", "hello", "-m", model, "-n", "3", *SMALL, "--device", "simulated",
             "--host-memory", "1MB", "--json")
    )  # fmt: skip
    assert "copy" in told["stages"]


def test_a_trace(here: Here, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older one")
    assert here("generate", "hello", "-m", model, "-n", "3", *SMALL, "--trace", path).code == 0
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"disk", "verify", "commit"} <= tracks
    assert list(tmp_path.iterdir()) == [path]


def test_an_answer_ends_before_a_stop_string(here: Here, model: Path) -> None:
    ask = ("generate", "hello", "-m", model, "-n", "12", *SMALL, "--json")
    whole = loads(here(*ask))["answer"]
    stop = whole["text"][-2:]
    cut = loads(here(*ask, "--stop", "never said", "--stop", stop))["answer"]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (whole["logprobs"], cut["finish_reason"]) == (None, "stop")


def test_options_of_the_request_reach_it(
    here: Here, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    async def run_generate(settings: Settings, prompt: str, options: Any, **_: object) -> None:
        asked.append({name: value for name, value in options.items() if value is not None})

    monkeypatch.setattr(commands, "run_generate", run_generate)
    flags = (
        "--top-k 5 --top-p .9 --min-p .1 --typical-p .8 --repeat-penalty 1.1 --presence-penalty -1"
        " --frequency-penalty .5 --logit-bias 7=-100 --logit-bias 8=1.5 --stop a --stop b=c"
        " --logprobs 0"
    )
    assert here("generate", "hello", "-m", model, *flags.split()).code == 0
    assert asked == [
        {
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "typical_p": 0.8,
            "repetition_penalty": 1.1,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {7: -100.0, 8: 1.5},
            "stop": ["a", "b=c"],
            "logprobs": 0,
        }
    ]
    assert set(asked[0]) < set(NAMES)


# --- plan ---


@pytest.mark.usefixtures("unloaded")
def test_a_plan_loads_no_weights(here: Here, model: Path) -> None:
    done = here("plan", "-m", model, *SMALL)
    assert done.code == 0 and done.err == ""
    for words in ("Plan: ", "streamed weights, each sweep", "Predicted", "seconds a sweep"):
        assert words in done.out
    told = loads(here("plan", "-m", model, *SMALL, "--json"))
    assert told["budget"] == 28000 * 1024 and told["streamed_bytes_per_sweep"] > 0


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("asked", "step", "depth"), [("lookup", "lookup", 15), ("none", "plain", 0)]
)
def test_what_drafts_in_place_of_substitutes_can_be_chosen(
    here: Here, model: Path, asked: str, step: str, depth: int
) -> None:
    told = loads(here("plan", "-m", model, *SMALL, "--json", "--substitute", asked))
    assert (told["step"], told["depth"]) == (step, depth)
    assert told["placement"]["substitute"] is None


# --- Settings ---


@pytest.mark.usefixtures("unloaded")
def test_the_command_line_wins_over_variables_and_those_over_defaults(
    here: Here, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_MODEL", str(model))
    monkeypatch.setenv("PACELINE_MEMORY", "30MiB")
    monkeypatch.setenv("PACELINE_CTX_SIZE", "100")
    told = loads(here("plan", "--json"))
    assert (told["budget"], told["placement"]["context"]) == (30 << 20, 100)
    told = loads(here("plan", "--json", "--memory", "31MiB"))
    assert (told["budget"], told["placement"]["context"]) == (31 << 20, 100)


@pytest.mark.usefixtures("unloaded")
def test_a_bad_variable_is_named(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MEMORY", "banana")
    assert "PACELINE_MEMORY was 'banana'; expected a size" in here("plan").complaint


# --- Mistakes in options ---

OPTIONS = [
    ("generate", "-n", "--max-tokens"),
    ("generate", "-s", "--seed"),
    ("generate", "--temp", "--temp"),
    ("generate", "--memory", "--memory"),
    ("generate", "--host-memory", "--host-memory"),
    ("generate", "-c", "--ctx-size"),
    ("generate", "--link-gbps", "--link-gbps"),
    ("plan", "--memory", "--memory"),
    ("plan", "--host-memory", "--host-memory"),
    ("plan", "-c", "--ctx-size"),
    ("plan", "--sessions", "--sessions"),
    ("plan", "--link-gbps", "--link-gbps"),
]


@pytest.mark.parametrize(("verb", "flag", "name"), OPTIONS)
def test_negative_numbers(here: Here, verb: str, flag: str, name: str) -> None:
    prompt = ["hello"] if verb == "generate" else []
    complaint = here(verb, *prompt, flag, "-3").complaint
    assert complaint.startswith(f"{name} was ") and "-3" in complaint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "0"], "--max-tokens was 0"),
        (["-c", "0"], "--ctx-size was 0"),
        (["-n", "many"], "'-n' / '--max-tokens'"),
        (["-n", "1.5"], "'-n' / '--max-tokens'"),
        (["--temp", "nan"], "--temp was nan"),
        (["--temp", "1e999"], "--temp was inf"),
        (["--seed", str(2**64)], "--seed was 18446744073709551616"),
        (["--memory", "0"], "--memory was '0'"),
        (["--memory", "200 apples"], "--memory was '200 apples'"),
        (["--memory", "1e9"], "--memory was '1e9'"),
        (["--memory", "9999999999999GiB"], "--memory was "),
        (["--link-gbps", "0"], "--link-gbps was 0.0"),
        (["--link-gbps", "1e-300"], "--link-gbps was 1e-300"),
        (["--device", "tpu"], "--device was 'tpu'; expected auto, cpu or simulated"),
        (["--substitute", "int5"], "--substitute was 'int5'"),
        (["-m", ""], "--model was ''"),
        (["--top-k", "-1"], "--top-k was -1; expected a whole number of at least 0"),
        (["--top-p", "0"], "--top-p was 0.0; expected a number above 0, at most 1"),
        (["--min-p", "1.5"], "--min-p was 1.5; expected a number from 0 to 1"),
        (["--typical-p", "nan"], "--typical-p was nan"),
        (["--repeat-penalty", "0"], "--repeat-penalty was 0.0; expected a number from 0.01 to 100"),
        (["--presence-penalty", "2.5"], "--presence-penalty was 2.5"),
        (["--frequency-penalty", "-inf"], "--frequency-penalty was -inf"),
        (["--logit-bias", "7"], "--logit-bias was '7'; expected TOKEN=BIAS"),
        (["--logit-bias", "the=1"], "--logit-bias was 'the=1'; expected TOKEN=BIAS"),
        (["--logit-bias", "7=big"], "--logit-bias was '7=big'; expected TOKEN=BIAS"),
        (["--logit-bias", "7=101"], "--logit-bias was 101.0; expected a number from -100 to 100"),
        (["--logit-bias", "-7=1"], "--logit-bias was -7; expected token ids"),
        (["--stop", ""], "--stop was ''; expected texts of 1 to"),
        (["--logprobs", "21"], "--logprobs was 21; expected a whole number from 0 to 20"),
        (["--logprobs", "many"], "'--logprobs'"),
        (["--host-memory", "1GB"], "no such cap on device cpu"),
        (["--host-memory", "1GB", "--device", "cpu"], "no such cap on device cpu"),
    ],
)
def test_nonsense(here: Here, options: list[str], words: str) -> None:
    assert words in here("generate", "hello", *options).complaint


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt(here: Here, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PROMPT was " in here("generate", prompt).complaint
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert "PROMPT was " in here("generate", "-").complaint


def test_standard_input_that_is_no_text(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    assert "UTF-8" in here("generate", "-").complaint
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input" in here("generate", "-").complaint


def test_standard_input_without_an_end(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LONGEST_INPUT", 8)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    assert "at most 8 characters" in here("generate", "-").complaint


@pytest.mark.usefixtures("unloaded")
def test_a_prompt_that_is_no_text(here: Here, model: Path) -> None:
    assert "UTF-8" in here("generate", "a\udcff", "-m", model).complaint


@pytest.mark.usefixtures("unloaded")
def test_a_token_that_the_model_has_not(here: Here, model: Path) -> None:
    complaint = here("generate", "hello", "-m", model, "--logit-bias", "320=1").complaint
    assert complaint == "--logit-bias was 320; expected token ids from 0 to 319."


@pytest.mark.usefixtures("unloaded")
def test_a_prompt_longer_than_the_context(here: Here, model: Path) -> None:
    complaint = here("generate", "a" * 100, "-m", model, "-c", "64").complaint
    assert "The prompt has 103 tokens, but the context holds 64" in complaint


@pytest.mark.usefixtures("unloaded")
def test_a_context_longer_than_the_models(here: Here, model: Path) -> None:
    assert "at most 512 tokens" in here("plan", "-m", model, "-c", "513").complaint


def test_the_smallest_budget_that_is_named_works(here: Here, model: Path) -> None:
    asked = ("generate", "hello", "-m", model, "-c", "64", "-n", "4")
    complaint = here(*asked, "--memory", "1MiB").complaint
    found = re.search(r"of 1 MiB is too small: the smallest plan needs (\d+ MiB)", complaint)
    assert found and "Change --" in complaint
    assert here(*asked, "--memory", found[1]).code == 0


@pytest.mark.usefixtures("unloaded")
def test_a_budget_above_what_is_free(here: Here, model: Path) -> None:
    complaint = here("plan", "-m", model, "--memory", "900000GiB").complaint
    assert re.search(r"--memory was '\d+ MiB'; expected at most \d+ MiB, what is free", complaint)


# --- Mistakes in models ---


def replace(name: str, text: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / name).write_text(text)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / name).unlink()

    return damage


def truncate(model: Path) -> None:
    file = model / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def configure(**fields: object) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))

    return damage


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), "config.json"),
        (replace("config.json", "{"), "config.json: it is not valid JSON"),
        (replace("config.json", ""), "config.json: it is not valid JSON"),
        (configure(hidden_size="wide"), "config.json: transformers cannot read it"),
        (configure(hidden_act="none"), "config.json: no model can be built from it"),
        (configure(model_type="mamba", state_size=4), "'mamba' is not supported (it has recurr"),
        (configure(model_type="gpt2"), "Supported: llama, mistral"),
        (remove("model-00002-of-00003.safetensors"), "00002-of-00003.safetensors: it is missing"),
        (truncate, "model-00002-of-00003.safetensors: "),
        (remove("model.safetensors.index.json"), "model.safetensors"),
        (remove("tokenizer.json"), "one with tokenizer.json"),
        (replace("tokenizer.json", "{"), "its tokenizer cannot be read"),
        (replace("generation_config.json", "{"), "generation_config.json: it is not valid JSON"),
        (replace("chat_template.jinja", "{{ oops"), "that the model's chat template takes"),
    ],
)
def test_a_damaged_model(
    here: Here, copy: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(copy)
    assert words in here("generate", "hello", "-m", copy).complaint


@pytest.mark.parametrize("verb", [["plan"], ["generate", "hello"]])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "There is no such directory or file"),
        ("nobody/nothing", "Hugging Face could not be reached"),
        ("no model at all", "nor a Hugging Face id"),
        ("/dev/null", "'/dev/null' was not found"),
    ],
)
def test_no_such_model(here: Here, verb: list[str], name: str, words: str, tmp_path: Path) -> None:
    assert words in here(*verb, "-m", name).complaint
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"nonsense" * 99])
def test_a_gguf_with_a_nonsense_header(here: Here, tmp_path: Path, data: bytes) -> None:
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(data)
    assert str(gguf) in here("generate", "hello", "-m", gguf).complaint
    assert nothing_left(tmp_path)


def test_a_disk_that_is_full_while_converting(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = MadeGguf(tmp_path, "llama").write(tmp_path / "made.gguf")
    write = SafetensorsWriter.write

    def full(writer: SafetensorsWriter, piece: memoryview) -> None:
        if writer.written > writer.total // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, piece)

    monkeypatch.setattr(SafetensorsWriter, "write", full)
    for verb in (["plan"], ["generate", "hello"]):
        done = here(*verb, "-m", gguf)
        assert done.code == 2 and done.out == ""
        progress, _, complaint = done.err.rstrip("\n").rpartition("\n")
        assert progress.startswith("Converting the model: ")
        assert complaint.startswith("paceline: ") and "Free some space" in complaint
        assert nothing_left(tmp_path)


@pytest.mark.parametrize("place", ["/dev/null/cache", "file"])
def test_a_cache_that_cannot_be(
    here: Here, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / place))
    assert "PACELINE_CACHE was " in here("plan").complaint


def nothing_left(tmp_path: Path) -> bool:
    """Whether the caches hold no file, and no half-made directory."""
    found = [path for name in ("cache", "hub") for path in (tmp_path / name).rglob("*")]
    return not [path for path in found if path.is_file() or "partial" in path.name]


# --- Traces that cannot be written ---


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("name", ["", "nowhere/trace.json", "file/trace.json", "x" * 255])
def test_a_trace_that_cannot_be_written(here: Here, model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    complaint = here("generate", "hello", "-m", model, "--trace", tmp_path / name).complaint
    assert complaint.startswith("--trace was ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("unloaded")
def test_a_trace_replaces_no_device(here: Here, model: Path) -> None:
    complaint = here("generate", "hello", "-m", model, "--trace", "/dev/null").complaint
    assert complaint.startswith("--trace was '/dev/null'; expected a file")
    assert not Path("/dev/null").is_file()


# --- Failures that are nobody's mistake ---


def test_a_failure_while_running(here: Here, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> NoReturn:
        raise EngineError("verifier", ValueError("made\nto fail"))

    monkeypatch.setattr(commands, "_answer", fail)
    done = here("generate", "hello", "-m", model, "--json")
    assert done.code == 1 and done.out == ""
    assert done.err.startswith("paceline: The verifier failed (ValueError: made to fail).")


def test_a_file_that_cannot_be_read(
    here: Here, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    monkeypatch.setattr(commands, "look", fail)
    done = here("plan", "-m", model)
    assert (done.code, done.err) == (1, "paceline: some/file: Permission denied\n")


def test_a_tokenizer_that_gives_nothing() -> None:
    class Mute:
        has_chat_template = False

        def encode(self, text: str) -> list[int]:
            return []

    question = commands.Question(Settings(), "hello", {}, raw=False)
    chosen = SimpleNamespace(placement=SimpleNamespace(context=64))
    with pytest.raises(OptionError, match=r"PROMPT was 'hello'; expected at least one token"):
        question.read(Mute(), chosen, 320)  # type: ignore[arg-type]
