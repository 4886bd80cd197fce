"""A GGUF file becomes a directory of config, tokenizer and safetensors.

Done once for a file, tensor by tensor: in memory is one matrix of one layer at most, and a strip
of the embedding. Which tensor is which, and how llama.cpp's layout is undone (rows of q and k in
another order, one added to gemma's norms), come from transformers' own tables for such files.
What transformers passes over in silence is an error here: a tensor that the model has no place
for, a parameter that the file lacks, a shape that differs, a number that is not finite.

Quantized tensors become float32; F16, BF16 and F32 stay as they are, except that vectors (norms
and biases) are always float32. The order in the file is that of a sweep: embedding, layers by
number, norm, head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from routing.errors import LinkError, ModelFormatError
from stages.cache import atomic_directory
from stages.gguf_config import model_config
from stages.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from stages.gguf_rope import FACTORS
from stages.gguf_support import one_line, unsupported
from stages.gguf_tensors import PLAIN, can_dequantize, read_floats, read_stored, take_rows
from stages.gguf_tokenizer import write_tokenizer
from stages.progress import Progress
from stages.safetensors_writer import SHARD_BYTES, NewTensor, SafetensorsWriter
from stages.source_file import SourceFile
from stages.strict_json import shown

# Large, and rows of them are left in place and as they are: no need to hold them whole.
_BY_ROWS: Final = ("token_embd.weight", "output.weight")
_FACTOR_LIMIT: Final = 4096
_STRIP: Final = 16 << 20  # bytes of float32
_SLACK: Final = 64 << 20  # bytes for the headers, the config and the tokenizer


class Move(msgspec.Struct, frozen=True):
    """One tensor's way from the GGUF file into the checkpoint."""

    source: GgufTensor
    target: NewTensor


def convert(path: Path, out: Path, progress: Progress, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in the GGUF file ``path`` as the directory ``out``, whole or not at all.

    ``progress`` counts bytes written. Weights of more than ``shard_bytes`` bytes are split into
    files, with an index. Raises ModelFormatError for a damaged file, UnsupportedModelError for a
    sound one that cannot be converted, DiskFullError; nothing is left behind then, nor by Ctrl-C.
    """
    with closing(SourceFile.open(path)) as file:
        header = read_gguf_header(file)
        try:
            config, moves, processor = _plan(file, header)
            tensors = [move.target for move in moves]
            needed = sum(tensor.nbytes for tensor in tensors) + _SLACK
            with atomic_directory(out, needed) as directory:
                _write_config(config, moves, directory)
                write_tokenizer(header, directory)
                with SafetensorsWriter(directory, tensors, shard_bytes) as writer:
                    for move in moves:
                        for piece in _pieces(file, move, processor):
                            writer.write(np.ascontiguousarray(piece).data.cast("B"))
                            progress.step("converting the model", writer.written, writer.total)
                    writer.finish()
        except LinkError as error:  # it was whole when its header was read
            raise ModelFormatError(str(path), error.problem) from error


def _plan(file: SourceFile, header: GgufHeader) -> tuple[Any, list[Move], Any]:
    """The config, the moves in order, and what undoes llama.cpp's layout. Reads no weights."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    config = model_config(header, _factors(file, header))
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    return config, _moves(header, config), processor


def _factors(file: SourceFile, header: GgufHeader) -> dict[str, Sequence[float]]:
    """The values of the tensors that scale rotary frequencies, as many as half a head has."""
    found: dict[str, Sequence[float]] = {}
    for tensor in (header.tensors[name] for name in FACTORS if name in header.tensors):
        if len(tensor.shape) != 1 or tensor.shape[0] > _FACTOR_LIMIT or tensor.kind not in PLAIN:
            raise ModelFormatError(
                str(header.path), f"tensor {tensor.name} is {tensor.kind.name} {tensor.shape}"
            )
        found[tensor.name] = read_floats(file, tensor).tolist()
    return found


def _moves(header: GgufHeader, config: Any) -> list[Move]:
    """Every parameter of the model has its tensor, and every tensor is of use."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # sizes that do not go together, in many ways
        raise ModelFormatError(
            str(header.path),
            f"its metadata describe no {header.architecture} model ({one_line(error)})",
        ) from error
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    names = _gguf_names(header.architecture, config.num_hidden_layers, shapes)
    if unknown := header.tensors.keys() - names.values() - set(FACTORS):
        raise unsupported(header.architecture, f"it has the tensor {shown(min(unknown))}")
    moves = []
    for name, shape in shapes.items():
        source = _checked(header, name, shape, header.tensors.get(names[name]))
        moves.append(Move(source, _target(name, shape, source)))
    return moves


def _gguf_names(architecture: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    """What each parameter is called in a GGUF file.

    transformers has a function for it, but makes the whole table anew for each submodule, which
    takes longer than the rest of the conversion. The table is the gguf package's.
    """
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, layers)
    found = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        found[name] = f"{table.get_name(stem)}.{suffix}"
    return found


def _checked(
    header: GgufHeader, name: str, shape: tuple[int, ...], tensor: GgufTensor | None
) -> GgufTensor:
    if tensor is None:
        raise ModelFormatError(str(header.path), f"it holds no tensor for {name}")
    if tensor.shape != shape:
        raise ModelFormatError(
            str(header.path),
            f"tensor {shown(tensor.name)} has the shape {tensor.shape}, expected {shape}",
        )
    if not can_dequantize(tensor.kind):
        raise ModelFormatError(
            str(header.path),
            f"tensor {shown(tensor.name)} is stored as {tensor.kind.name}, which is not decoded",
        )
    return tensor


def _target(name: str, shape: tuple[int, ...], tensor: GgufTensor) -> NewTensor:
    return NewTensor(name, PLAIN.get(tensor.kind, "F32") if len(shape) > 1 else "F32", shape)


def _write_config(config: Any, moves: list[Move], directory: Path) -> None:
    """config.json and generation_config.json. The dtype is the widest that a matrix has."""
    from transformers import GenerationConfig

    dtypes = {move.target.dtype for move in moves if len(move.target.shape) > 1}
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    config.dtype = names[dtypes.pop()] if len(dtypes) == 1 else "float32"
    config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(directory)


def _pieces(file: SourceFile, move: Move, processor: Any) -> Iterator[npt.NDArray[Any]]:
    """The target's values in order, in its dtype (bfloat16 as bits)."""
    source = move.source
    rows = source.shape[0]
    strip = rows
    if source.name in _BY_ROWS:
        strip = max(1, _STRIP // (4 * source.shape[1]))
    for start in range(0, rows, strip):
        part = take_rows(source, start, min(rows, start + strip))
        read = read_floats if move.target.dtype == "F32" else read_stored
        yield np.asarray(processor.process(read(file, part), source.name).weights)
