"""A one-layer cut of a model: what the memory of a budget is counted above.

Its files have the sizes and the kinds of the model's first layer, embedding and head, and nothing
in them: they are sparse, so that even a cut of a large model takes no disk.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

from stages.loading import OpenedModel

_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_LARGEST_COPY: Final = 256 << 20
_NOT_COPIED: Final = frozenset({"config.json", "generation_config.json"})
_COPIED: Final = frozenset({".json", ".jinja", ".model", ".txt"})


def write_cut(opened: OpenedModel, directory: Path) -> None:
    """Write the cut of `opened` into `directory`, which exists. Its answers mean nothing."""
    _write_config(opened.directory, directory)
    _write_weights(opened, directory / "model.safetensors")
    for path in opened.directory.iterdir():
        wanted = path.suffix in _COPIED and not path.name.endswith(".index.json")
        if wanted and path.name not in _NOT_COPIED and path.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(path, directory / path.name)


def _write_config(source: Path, directory: Path) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    # What a config says layer by layer is a list as long as the layers are many.
    cut = {
        key: value[:1] if isinstance(value, list) and len(value) == layers else value
        for key, value in config.items()
    }
    # Nothing ends an answer: the baseline is to go through whole rounds.
    cut |= {"num_hidden_layers": 1, "eos_token_id": None}
    (directory / "config.json").write_text(json.dumps(cut), encoding="utf-8")


def _write_weights(opened: OpenedModel, path: Path) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, spec in opened.checkpoint.tensors.items():
        layer = _LAYER.search(name)
        if layer is None or layer[1] == "0":
            offsets = [end, end + spec.nbytes]
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
            end += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
