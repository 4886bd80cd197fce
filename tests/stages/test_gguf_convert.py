"""GGUF files in, checkpoints out: the same model, whole or not at all, and never a surprise."""

from __future__ import annotations

import errno
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from routing.errors import (
    DiskFullError,
    ModelFormatError,
    UnsupportedModelError,
    UsageError,
)
from stages import cache, gguf_convert
from stages.checkpoint import Checkpoint
from stages.gguf_convert import convert
from stages.gguf_support import CONVERTIBLE
from stages.progress import SilentProgress
from stages.safetensors_writer import SafetensorsWriter
from tests.made import ROPES, longrope, make_prompt, reference_logits
from tests.stages.made_gguf import MadeGguf, sentencepiece_tokens

SILENT = SilentProgress()
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def converted(made: MadeGguf, tmp_path: Path) -> Path:
    convert(made.write(tmp_path / "model.gguf"), tmp_path / "out", SILENT)
    return tmp_path / "out"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_model(out: Path, original: Path, length: int = 48) -> None:
    """The same weights bit for bit, and the same logits: the config says the same."""
    new, old = weights(out), weights(original)
    assert new.keys() == old.keys()
    for name, tensor in old.items():
        if name.endswith("norm.weight"):  # gemma's go through 1 + w in float32
            torch.testing.assert_close(new[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(new[name], tensor), name
    vocabulary = json.loads((out / "config.json").read_text())["vocab_size"]
    prompt = make_prompt(vocabulary, length)
    ours = reference_logits(out, prompt, torch.float32)
    assert torch.allclose(ours, reference_logits(original, prompt, torch.float32), atol=2e-4)


@pytest.mark.parametrize("architecture", CONVERTIBLE)
def test_every_architecture_comes_out_as_the_model_it_was(
    architecture: str, tmp_path: Path
) -> None:
    made = MadeGguf(tmp_path, architecture)
    assert_same_model(converted(made, tmp_path), made.original)


@pytest.mark.parametrize(
    ("architecture", "overrides", "own"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24}, {}),
        ("qwen2", {"tie_word_embeddings": True}, {}),
        (
            "qwen2",
            {"rope_parameters": ROPES["yarn"]},
            {"rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64},
        ),
        ("llama", {"rope_parameters": ROPES["linear"]}, {"rope.scaling.factor": 3.0}),
        ("gemma3", {"rope_parameters": GEMMA3_ROPE}, {"rope.scaling.factor": 4.0}),
    ],
)
def test_variants_come_out_as_they_were(
    architecture: str, overrides: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    made = MadeGguf(tmp_path, architecture, **overrides)
    made.numbers |= own
    if own:
        kind = "yarn" if len(own) == 2 else "linear"
        made.texts[f"{architecture}.rope.scaling.type"] = kind
    assert_same_model(converted(made, tmp_path), made.original, length=96)


def llama3_factors(half: int, base: float, context: int, factor: float) -> np.ndarray[Any, Any]:
    """What llama.cpp writes: by how much each rotary frequency is divided (transformers' code)."""
    frequencies = 1.0 / base ** (np.arange(half) / half)
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < context / 4.0:
            factors.append(1.0)
        elif wavelength > context / 1.0:
            factors.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_scaling_of_llama_3_is_found_again(tmp_path: Path) -> None:
    rope = ROPES["llama3"] | {"original_max_position_embeddings": 8192}
    made = MadeGguf(tmp_path, "llama", rope_parameters=rope, rope_theta=10_000.0, head_dim=64)
    made.tensors["rope_freqs.weight"] = llama3_factors(32, 10_000.0, 8192, 8.0)
    out = converted(made, tmp_path)
    scaling = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert scaling == {**rope, "factor": 8.0}
    assert_same_model(out, made.original, length=96)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.tensors["rope_freqs.weight"] = np.linspace(1, 5, 8, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="not Llama 3's"):
        converted(made, tmp_path)


def test_the_long_factors_of_phi3_are_kept(tmp_path: Path) -> None:
    overrides = longrope()
    made = MadeGguf(tmp_path, "phi3", **overrides)
    made.numbers["rope.scaling.original_context_length"] = 24
    made.numbers["rope.dimension_count"] = 16
    for length in ("long", "short"):
        factors = overrides["rope_parameters"][f"{length}_factor"]
        made.tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    out = converted(made, tmp_path)
    assert_same_model(out, made.original, length=20)
    assert_same_model(out, made.original, length=40)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_quantized_tensors_are_what_transformers_makes_of_them(kind: Kind, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    made = MadeGguf(tmp_path, "llama")
    made.kind = lambda name: kind
    out = converted(made, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made.original))
    theirs = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=model)
    ours = weights(out)
    assert ours.keys() == theirs["tensors"].keys()
    assert all(torch.equal(ours[name], theirs["tensors"][name]) for name in ours)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)]
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_floats_keep_their_dtype(
    architecture: str, kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = MadeGguf(tmp_path, architecture)
    made.kind = lambda name: kind
    out = converted(made, tmp_path)
    old = weights(made.original)
    for name, tensor in weights(out).items():
        if tensor.ndim > 1:
            assert torch.equal(tensor, old[name].to(dtype)), name
        else:
            assert tensor.dtype == torch.float32
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert "quantization_config" not in config


def test_mixed_files_are_as_wide_as_their_widest_matrix(tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.kind = lambda name: Kind.Q8_0 if "ffn" in name else Kind.F16
    out = converted(made, tmp_path)
    kinds = {t.dtype for t in weights(out).values()}
    assert kinds == {torch.float16, torch.float32}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_shards_hold_the_same_tensors_in_the_order_of_a_sweep(tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    path = made.write(tmp_path / "model.gguf")
    convert(path, tmp_path / "one", SILENT)
    convert(path, tmp_path / "many", SILENT, shard_bytes=100_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    with (
        Checkpoint.open(tmp_path / "one") as one,
        Checkpoint.open(tmp_path / "many") as many,
    ):
        assert one.tensors.keys() == many.tensors.keys()
        order = sorted(one.tensors.values(), key=lambda spec: spec.offset)
        assert order[0].offset % 4096 == 0
        assert order[0].name == "model.embed_tokens.weight"
        assert order[-1].name == "lm_head.weight"
        for name in one.tensors:
            assert torch.equal(one.read(name), many.read(name))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.token_fields["eot_token_id"] = 0
    out = converted(made, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "then the  thé 🎈 x"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("then the") == ["th", "e", "n", "Ġth", "e"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>").input_ids == [made.tokens.index("<|im_end|>")]
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [made.tokens.index("<|im_end|>"), 0]
    assert generation["bos_token_id"] == made.tokens.index("<|im_start|>")


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_smollm_splits_digits(pre: str, tokens: list[str], tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.token_fields["pre"] = pre
    assert AutoTokenizer.from_pretrained(converted(made, tmp_path)).tokenize("12") == tokens


def test_a_sentencepiece_tokenizer_comes_along(tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.tokens = sentencepiece_tokens(made.config["vocab_size"])
    made.token_fields = {
        "model": "llama",
        "scores": [-float(index) for index in range(len(made.tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(converted(made, tmp_path))
    assert tokenizer("ab").input_ids == [1, made.tokens.index("▁ab")]
    assert tokenizer.decode(tokenizer("ab é").input_ids, skip_special_tokens=True) == "ab é"


@pytest.mark.parametrize("architecture", ["falcon", "mistral", "qwen3moe", "gpt-oss", "nonsense"])
def test_other_architectures_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    made.architecture = architecture
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}'.*llama, phi3"):
        converted(made, tmp_path)


def change_number(key: str, value: Any) -> Callable[[MadeGguf], None]:
    return lambda made: made.numbers.__setitem__(key, value)


def change_token_field(key: str, value: Any) -> Callable[[MadeGguf], None]:
    return lambda made: made.token_fields.__setitem__(key, value)


def change_text(key: str, value: str) -> Callable[[MadeGguf], None]:
    return lambda made: made.texts.__setitem__(key, value)


def change_tensor(name: str, shape: tuple[int, ...]) -> Callable[[MadeGguf], None]:
    return lambda made: made.tensors.__setitem__(name, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_number("expert_count", 8), "mixture of experts"),
        (change_number("rope.dimension_count", 8), "8 of 16 dimensions"),
        (change_number("attention.value_length", 8), "differ in size"),
        (change_number("logit_scale", 2.0), "logit_scale"),
        (change_tensor("blk.0.attn_sinks.weight", (4,)), "blk.0.attn_sinks.weight"),
        (change_tensor("blk.0.attn_q.bias", (64,)), None),
        (change_token_field("pre", "viking"), "'viking'"),
        (change_token_field("model", "bert"), "'bert'"),
        (change_text("llama.rope.scaling.type", "dynamic"), "'dynamic'"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    change: Callable[[MadeGguf], None], why: str | None, tmp_path: Path
) -> None:
    made = MadeGguf(tmp_path, "llama")
    change(made)
    expected = UnsupportedModelError if why else ModelFormatError
    with pytest.raises(expected, match=why):
        converted(made, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_number("block_count", 0), "block_count is 0"),
        (change_number("block_count", 4_000_000_000), "claims 4000000000 layers"),
        (change_number("block_count", 5), "holds no tensor for"),
        (change_number("attention.head_count", 0), "head_count is 0"),
        (change_number("attention.head_count", 3), "no llama model|has the shape|dimensions"),
        (change_number("embedding_length", 1 << 31), "has the shape|no llama model|dimensions"),
        (change_number("rope.freq_base", float("nan")), "freq_base is nan"),
        (change_tensor("blk.1.ffn_up.weight", (3, 64)), r"\(3, 64\), expected \(128, 64\)"),
        (change_tensor("token_embd.weight", (8, 64)), "as its embedding has rows"),
        (change_token_field("eos_token_id", 999), "expected a token id under 320"),
        (change_token_field("merges", ["no such"]), "tokenizer cannot be rebuilt"),
        (lambda made: made.tensors.pop("blk.2.attn_v.weight"), "layers.2.self_attn.v_proj"),
        (lambda made: made.tensors["output_norm.weight"].__setitem__(3, np.nan), "not finite"),
        (lambda made: made.tensors["token_embd.weight"].__setitem__(3, np.inf), "not finite"),
    ],
)
def test_damage_is_named(change: Callable[[MadeGguf], Any], problem: str, tmp_path: Path) -> None:
    made = MadeGguf(tmp_path, "llama")
    change(made)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=problem):
        converted(made, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "original"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that is sound. Not to be changed."""
    directory = tmp_path_factory.mktemp("small")
    made = MadeGguf(directory, "llama", layers=1, vocab=270)
    made.kind = lambda name: Kind.Q8_0
    return made.write(directory / "small.gguf")


@given(place=st.floats(0, 1), new=st.binary(min_size=1, max_size=3))
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_changed_file_is_converted_or_refused(
    place: float, new: bytes, small: Path, tmp_path: Path
) -> None:
    data = bytearray(small.read_bytes())
    # Past the vocabulary and its types, where most of the bytes are: the rest decides more.
    fields = [data.index(b"general.architecture"), data.index(b"tokenizer.ggml.model") - 8]
    at = fields[0] + int(place * 900) if place < 0.5 else fields[1] + int(place * 3000)
    data[at : at + len(new)] = new
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    out = tmp_path / "out"
    refusal = ""
    try:
        convert(path, out, SILENT)
    except UsageError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert out.exists() == (not refusal)
    if out.exists():
        Checkpoint.open(out).close()
        shutil.rmtree(out)


class Interrupted(SilentProgress):
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.left = 3

    def step(self, what: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("cancelled")])
def test_an_interrupt_leaves_nothing(error: BaseException, small: Path, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        convert(small, tmp_path / "out", Interrupted(error))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_known_before_the_first_byte(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(DiskFullError, match="1 MiB free"):
        convert(small, tmp_path / "out", SILENT)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SafetensorsWriter.write

    def full(self: SafetensorsWriter, piece: memoryview) -> None:
        if self.written > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, piece)

    monkeypatch.setattr(SafetensorsWriter, "write", full)
    with pytest.raises(DiskFullError):
        convert(small, tmp_path / "out", SILENT)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_under_the_tokenizers_writer_is_told_as_such(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, directory: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(DiskFullError):
        convert(small, tmp_path / "out", SILENT)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_the_bytes_written(small: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    class Progress:
        def step(self, what: str, done: int, total: int) -> None:
            seen.append((what, done, total))

    convert(small, tmp_path / "out", Progress())
    assert {what for what, _, _ in seen} == {"converting the model"}
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert seen[-1][1] == seen[-1][2] == sum(t.nbytes for t in weights(tmp_path / "out").values())


def test_the_embedding_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_STRIP", 1 << 20)
    made = MadeGguf(tmp_path, "llama", layers=1, vocab=40_000, tied=True)
    made.kind = lambda name: Kind.Q8_0
    path = made.write(tmp_path / "model.gguf")
    convert(path, tmp_path / "warm", SILENT)  # imports
    embedding = 40_000 * 64 * 4
    monkeypatch.setattr(gguf_convert, "write_tokenizer", lambda header, directory: None)
    tracemalloc.start()
    try:
        convert(path, tmp_path / "out", SILENT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < embedding // 2
