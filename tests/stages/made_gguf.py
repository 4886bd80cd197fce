"""Made GGUF files: a made model of tests.made, laid out as llama.cpp lays models out.

The layout is written out here, from llama.cpp's own converters, and not taken from the tables the
code under test reads: rows of q and k of a llama are interleaved by halves of a head, gemma's
norms hold one more, names and metadata are llama.cpp's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.made import make_model

F32 = GGMLQuantizationType.F32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# What GGUF files cannot say, or what tests.made makes otherwise than any file.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32, "layer_types": None},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "layer_types": None,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {},
}
MERGES = ("Ġ t", "t h", "Ġt h", "h e", "1 2")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class MadeGguf:
    """A GGUF file in the making. ``write`` may be called once; change what is public before."""

    def __init__(self, directory: Path, architecture: str, **overrides: Any) -> None:
        """Make the model in ``directory`` / "original" (float32); it is what must come out."""
        self.architecture = architecture
        self.original = directory / "original"
        model_type = "gemma3_text" if architecture == "gemma3" else architecture
        fields = PLAIN[architecture] | overrides
        make_model(self.original, model_type, dtype=torch.float32, **fields)
        self.config = json.loads((self.original / "config.json").read_text())
        self.kind: Callable[[str], GGMLQuantizationType] = lambda name: F32
        self.tensors = self._tensors()
        self.numbers: dict[str, int | float] = self._numbers()
        self.texts: dict[str, str] = {}
        self.tokens = gpt2_tokens(self.config["vocab_size"])
        self.token_fields: dict[str, Any] = {
            "model": "gpt2",
            "pre": "smollm",
            "merges": list(MERGES),
            "bos_token_id": self.tokens.index("<|im_start|>"),
            "eos_token_id": self.tokens.index("<|im_end|>"),
            "padding_token_id": self.tokens.index("<|endoftext|>"),
            "add_bos_token": False,
        }

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.numbers.items():
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{self.architecture}.{key}", value)
        for key, text in self.texts.items():
            writer.add_string(key, text)
        writer.add_chat_template(TEMPLATE)
        writer.add_token_list(self.tokens)
        writer.add_token_types([3 if token in CONTROL else 1 for token in self.tokens])
        for key, value in self.token_fields.items():
            writer.add_key_value(f"tokenizer.ggml.{key}", value, *_type_of(value))
        for name, values in self.tensors.items():
            kind = self.kind(name) if values.ndim > 1 else F32
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        gemma = self.architecture.startswith("gemma")
        found = {}
        for file in sorted(self.original.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                values = tensor.numpy()
                if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                    heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
                    values = interleave(values, self.config[heads])
                if gemma and name.endswith("norm.weight"):
                    values = values + 1
                found[self._name(name)] = np.ascontiguousarray(values)
        return found

    def _name(self, name: str) -> str:
        names = NAMES | (GEMMA_NAMES if self.architecture.startswith("gemma") else {})
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            return f"blk.{layer}.{names[rest]}.{suffix}"
        return f"{names[stem]}.{suffix}"

    def _numbers(self) -> dict[str, int | float]:
        config = self.config
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        rope = config["rope_parameters"]
        rope = rope.get("full_attention", rope)
        numbers = {
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.freq_base": rope["rope_theta"],
            "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        }
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None:
                numbers[key] = float(config[key])
        if self.architecture in ("gemma2", "gemma3", "phi3"):
            numbers["attention.sliding_window"] = config["sliding_window"]
        return numbers


def _type_of(value: Any) -> tuple[Any, ...]:
    kind = gguf.GGUFValueType
    if isinstance(value, list):
        return kind.ARRAY, gguf.GGUFValueType.get_type(value[0])
    return (kind.UINT32,) if type(value) is int else (kind.get_type(value),)


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order of the rows of q or k: the halves of each head, one row of each in turn."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gpt2_tokens(count: int) -> list[str]:
    """A byte-level vocabulary of ``count`` tokens: bytes, what MERGES make, CONTROL, padding."""
    tokens = [*sorted(bytes_to_unicode().values()), *(m.replace(" ", "") for m in MERGES), *CONTROL]
    return tokens + [f"[PAD{index}]" for index in range(len(tokens), count)]


def sentencepiece_tokens(count: int) -> list[str]:
    """A vocabulary as SentencePiece makes them, of ``count`` tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "ab", "▁ab"]
    return tokens + [f"[PAD{index}]" for index in range(len(tokens), count)]
