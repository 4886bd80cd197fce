"""From what a user calls a model to a directory with config.json, safetensors and a tokenizer."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from routing.errors import ModelFormatError, ModelNotFoundError
from stages.cache import cache_dir
from stages.default_model import DEFAULT, default_gguf
from stages.gguf_support import CONVERSION
from stages.model_files import find_files
from stages.progress import Progress
from stages.source_file import SourceFile

DEFAULT_NAME: Final = "smollm2"
_STEM: Final = 40  # characters


def resolve(model: str | Path | None, progress: Progress) -> Path:
    """The directory of ``model``, which is prepared first if it has to be.

    ``model`` is a directory (taken as it is); a GGUF file (converted once, and found again by its
    content, wherever it lies then); a Hugging Face id such as "owner/name"; or None or "smollm2"
    for the default model, which is fetched and converted once. What exists as a path is never
    taken for an id. Tensors are not checked here: ``Checkpoint.open`` does that.

    Blocks for as long as it takes: not for the event loop. Raises ModelNotFoundError,
    ModelFormatError, UnsupportedModelError, DiskFullError, OptionError (the cache directory).
    """
    if model is None or model == DEFAULT_NAME:
        return _prepared(f"{DEFAULT_NAME}-{DEFAULT.sha256[:16]}", default_gguf, progress)
    path = Path(model).expanduser()
    if not str(model) or "\0" in str(model):
        raise ModelNotFoundError(str(model), "Give a directory, a GGUF file, or 'owner/name'.")
    if os.path.isdir(path):
        _check_directory(path)
        return path
    if os.path.isfile(path):
        return _converted(path, progress)
    if isinstance(model, Path) or _looks_like_path(model):
        raise ModelNotFoundError(str(model), "There is no such directory or file.")
    from stages import hub

    return hub.fetch(model, progress)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.lower().endswith((".gguf", ".safetensors"))


def _check_directory(path: Path) -> None:
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        raise ModelFormatError(
            str(path), f"it holds no config.json, but {files[0].name}; give that file's own path"
        )
    find_files(path)


def _converted(path: Path, progress: Progress) -> Path:
    """The cached conversion of the GGUF file ``path``."""
    from stages.gguf_header import content_key, read_gguf_header

    if path.suffix == ".safetensors":
        raise ModelNotFoundError(str(path), "Give the directory that holds it and config.json.")
    with closing(SourceFile.open(path)) as file:
        key = content_key(file, read_gguf_header(file))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")[:_STEM] or "model"
    return _prepared(f"{stem}-{key}", lambda _: path, progress)


def _prepared(name: str, gguf: Callable[[Progress], Path], progress: Progress) -> Path:
    """The conversion called ``name`` in the cache, made from the file ``gguf`` gives if missing."""
    final = cache_dir() / "converted" / f"{name}-v{CONVERSION}"
    if final.is_dir():
        try:
            find_files(final)
            return final
        except ModelFormatError:  # somebody has been there: make it anew
            shutil.rmtree(final)
    from stages.gguf_convert import convert

    convert(gguf(progress), final, progress)
    return final
