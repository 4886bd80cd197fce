"""The values of tensors in a GGUF file, whole or by rows.

Nothing is mapped: what is read is asked for and given back. A weight that is not finite is a sign
of a damaged file, and one is enough to make every answer nonsense, so each is looked at.
"""

from __future__ import annotations

from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from routing.errors import ModelFormatError
from stages.gguf_header import GgufTensor
from stages.source_file import SourceFile
from stages.strict_json import shown

PLAIN: Final = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
"""The kinds that are not quantized, with their names in safetensors."""

# numpy has no bfloat16: its values are moved as bits.
_STORED: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_BF16_EXPONENT: Final = 0x7F80

_Array = npt.NDArray[Any]


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether ``read_floats`` understands ``kind``."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def take_rows(tensor: GgufTensor, start: int, stop: int) -> GgufTensor:
    """Rows ``start`` to ``stop`` of ``tensor``, as a tensor."""
    row = tensor.nbytes // tensor.shape[0]
    return GgufTensor(
        tensor.name,
        tensor.kind,
        (stop - start, *tensor.shape[1:]),
        tensor.offset + start * row,
        (stop - start) * row,
    )


def read_stored(file: SourceFile, tensor: GgufTensor) -> _Array:
    """The values of a tensor of a kind in PLAIN, in its own dtype (bfloat16 as bits)."""
    values: _Array = _read(file, tensor).view(_STORED[PLAIN[tensor.kind]]).reshape(tensor.shape)
    if tensor.kind == GGMLQuantizationType.BF16:
        finite = (values & _BF16_EXPONENT) != _BF16_EXPONENT
    else:
        finite = np.isfinite(values)
    _check_finite(file, tensor, finite)
    return values


def read_floats(file: SourceFile, tensor: GgufTensor) -> _Array:
    """The values of any tensor, in float32."""
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
    with np.errstate(all="ignore"):  # scales that are not finite show in the result
        values: _Array = gguf.dequantize(_read(file, tensor).reshape(shape), tensor.kind)
    _check_finite(file, tensor, np.isfinite(values))
    return values.reshape(tensor.shape)


def _read(file: SourceFile, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
    stored = np.empty(tensor.nbytes, np.uint8)
    file.read_into(stored.data, tensor.offset)
    return stored


def _check_finite(file: SourceFile, tensor: GgufTensor, finite: _Array) -> None:
    if not finite.all():
        raise ModelFormatError(
            str(file.path), f"tensor {shown(tensor.name)} has weights that are not finite"
        )
