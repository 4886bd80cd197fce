"""The tokenizer that a GGUF file holds, as files that transformers reads.

transformers rebuilds it. Two things are added: individual digits, which SmolLM's rules ask for and
transformers has no entry for, and a refusal of rules that nothing here can rebuild, where other
tokens than the model's own would be the result.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any, Final

from routing.errors import ModelFormatError
from stages.gguf_header import GgufHeader, StringArray
from stages.gguf_support import one_line, unsupported
from stages.strict_json import shown

# How text is split before byte pairs are merged, by llama.cpp's names. GPT-2's rule is what
# transformers falls back on, and what files have that name none.
_GPT2: Final = frozenset({"default", "gpt-2"})
_REBUILT: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"}
    | {"tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o"}
)
_DIGITS: Final = frozenset({"smollm"})


def write_tokenizer(header: GgufHeader, directory: Path) -> None:
    """Write the tokenizer's files, chat template included, into ``directory``.

    Raises UnsupportedModelError if its rules cannot be rebuilt, ModelFormatError if its parts are
    missing or do not fit together.
    """
    split = _check_kind(header)
    try:
        tokenizer = _rebuild(header.path)
        if split in _DIGITS:
            _split_digits(tokenizer)
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # The tokenizers' own writer raises plain exceptions.
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, "no space left on the device") from error
        raise ModelFormatError(
            str(header.path), f"its tokenizer cannot be rebuilt ({one_line(error)})"
        ) from error


def _check_kind(header: GgufHeader) -> object:
    """The name of the splitting rule, if there is one."""
    kind = header.fields.get("tokenizer.ggml.model")
    if not isinstance(kind, str):
        raise ModelFormatError(str(header.path), "it holds no tokenizer (tokenizer.ggml.model)")
    if kind not in ("gpt2", "llama"):
        raise unsupported(header.architecture, f"its tokenizer is of the kind {shown(kind)}")
    split = header.fields.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in _GPT2 | _REBUILT | _DIGITS:
        raise unsupported(
            header.architecture, f"its tokenizer splits text by the rules {ascii(split)[:80]}"
        )
    kinds = header.fields.get("tokenizer.ggml.token_type")
    tokens = header.fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    if kinds is not None and (not isinstance(kinds, tuple) or len(kinds) != tokens.count):
        raise ModelFormatError(str(header.path), "it has not one tokenizer.ggml.token_type a token")
    return split if kind == "gpt2" else None


def _rebuild(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    # Through a directory of its own: transformers would also read what lies beside the file.
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        (Path(directory) / "model.gguf").symlink_to(path.absolute())
        return PreTrainedTokenizerFast.from_pretrained(
            directory, gguf_file="model.gguf", local_files_only=True
        )


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
