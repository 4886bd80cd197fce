"""Which files make up a checkpoint: config.json, and one safetensors file or an index of shards.

Only JSON is read here. The names in an index come from outside, so they are taken as names below
the model's directory and as nothing else. Links are followed: a Hugging Face cache is made of them.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from routing.errors import ModelFormatError, ModelNotFoundError
from stages.strict_json import read_object, shown

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_CONFIG_LIMIT: Final = 10_000_000  # bytes
_INDEX_LIMIT: Final = 100_000_000


class ModelFiles(msgspec.Struct, frozen=True):
    """``config`` is config.json; ``shards`` maps each file to the tensors an index wants from it.

    Without an index there is one file, mapped to None: all that it holds.
    """

    config: dict[str, Any]
    shards: dict[Path, tuple[str, ...] | None]


def find_files(directory: Path) -> ModelFiles:
    """The files of the checkpoint in ``directory``. The weights are not opened.

    Raises ModelNotFoundError if there is no such directory, ModelFormatError if a file is missing
    or damaged or the weights are quantized already.
    """
    directory = directory.absolute()
    if not directory.is_dir():
        raise ModelNotFoundError(str(directory), "There is no such directory.")
    config_path = directory / CONFIG
    if not config_path.exists():
        raise ModelFormatError(
            str(directory), f"it holds no {CONFIG}, expected one beside the weights"
        )
    config = read_object(config_path, _CONFIG_LIMIT)
    _refuse_quantized(config, config_path)
    # The order of transformers, so that both read the same weights out of one directory.
    if (directory / SINGLE).exists():
        return ModelFiles(config, {directory / SINGLE: None})
    if (directory / INDEX).exists():
        return ModelFiles(config, _read_index(directory))
    raise ModelFormatError(
        str(directory),
        f"it holds neither {SINGLE} nor {INDEX}, expected weights in the safetensors format",
    )


def _refuse_quantized(config: dict[str, Any], path: Path) -> None:
    """Weights that somebody else has quantized are no full-precision target."""
    for part in (config, config.get("text_config")):
        quantized = part.get("quantization_config") if isinstance(part, dict) else None
        if quantized is not None:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            how = f" by {shown(method)}" if isinstance(method, str) else ""
            raise ModelFormatError(
                str(path),
                f"its quantization_config says that the weights are already quantized{how}, "
                "expected the original ones in 16, 32 or 64 bits",
            )


def _read_index(directory: Path) -> dict[Path, tuple[str, ...] | None]:
    index = directory / INDEX
    weight_map = read_object(index, _INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(
            str(index), "it has no weight_map, expected a table from tensor names to shards"
        )
    wanted: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelFormatError(
                str(index), f"tensor {shown(name)} is mapped to {ascii(shard)[:80]}, not to a file"
            )
        wanted.setdefault(_inside(directory, shard), []).append(name)
    # Sorted, so that nothing depends on the order in which an index happens to be written.
    return {path: tuple(wanted[path]) for path in sorted(wanted)}


def _inside(directory: Path, shard: str) -> Path:
    """The file of a shard. Its name may not lead out of the directory, on any system."""
    index = directory / INDEX
    if any(character in shard for character in "\0\\:") or not shard.isprintable():
        raise ModelFormatError(str(index), f"the shard {shown(shard)} is not a plain file name")
    relative = PurePosixPath(shard)
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelFormatError(
            str(index), f"the shard {shown(shard)} lies outside of the model's directory"
        )
    if relative.suffix != ".safetensors":
        raise ModelFormatError(str(index), f"the shard {shown(shard)} is not a .safetensors file")
    return directory / relative
