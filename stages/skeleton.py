"""A model without its weights: one decoder-layer module per layer, on the meta device.

Layers differ by index (window, rotary kind), so each has a module of its own. Tensors are bound
to it for as long as they are where they are, and released before a slot is refilled; the module
never owns them. What differs between architectures at model level is in architectures.py.

A skeleton serves one thread at a time: verifier and drafter have one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from routing.errors import ModelFormatError
from stages import attention
from stages.architectures import NORM, Architecture
from stages.attention import Riders
from stages.checkpoint import Checkpoint, TensorSpec
from stages.rope import Rope, cos_sin
from stages.shapes import LayerShape, MatrixShape, ModelShape

Rotary = tuple[torch.Tensor, torch.Tensor]


class Skeleton:
    """The decoder layers and the final norm of `config`, in `dtype`, with nothing bound."""

    def __init__(self, config: Any, architecture: Architecture, dtype: torch.dtype) -> None:
        attention.register()
        config._attn_implementation = attention.IMPLEMENTATION
        self.config = config
        self.architecture = architecture
        self.dtype = dtype
        modules = architecture.modules()
        with torch.device("meta"):
            self.layers = [
                modules.layer(config, index).to(dtype).eval()
                for index in range(architecture.layers)
            ]
            self.norm = modules.norm(config.hidden_size, eps=config.rms_norm_eps).to(dtype).eval()
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        for index, layer in enumerate(self.layers):
            self._find_homes(architecture.layer_prefix(index), layer)
        self._find_homes(NORM.removesuffix("weight"), self.norm)

    def _find_homes(self, prefix: str, module: nn.Module) -> None:
        for path, child in module.named_modules():
            where = f"{prefix}{path}." if path else prefix
            if child._buffers:
                raise AssertionError(f"{where} has buffers {list(child._buffers)} to rebuild")
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    parameter.requires_grad_(False)
                    self._homes[where + name] = (child, name)

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of this name can be bound."""
        return name in self._homes

    def home(self, name: str) -> nn.Module:
        """The module that uses the tensor called `name`."""
        return self._homes[name][0]

    def matrices(self, index: int) -> dict[str, torch.Size]:
        """Names and shapes of layer `index`'s weight matrices."""
        prefix = self.architecture.layer_prefix(index)
        found = {n: m._parameters[a] for n, (m, a) in self._homes.items() if n.startswith(prefix)}
        return {n: p.shape for n, p in found.items() if p is not None and p.dim() == 2}

    def small(self) -> dict[str, torch.Size]:
        """Names and shapes of all that is no matrix: norms and biases."""
        found = {n: m._parameters[a] for n, (m, a) in self._homes.items()}
        return {n: p.shape for n, p in found.items() if p is not None and p.dim() != 2}

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the modules use `tensors`, in the skeleton's dtype, until they are released."""
        for name, tensor in tensors.items():
            module, attribute = self._homes[name]
            # Not through setattr: that insists on nn.Parameter, and these are views into slots.
            module._parameters[attribute] = tensor  # type: ignore[assignment]

    def release(self, names: Iterable[str]) -> None:
        """Forget bound tensors, so that nothing can read a slot after it was given back."""
        for name in names:
            module, attribute = self._homes[name]
            bound = module._parameters[attribute]
            assert bound is not None
            module._parameters[attribute] = torch.empty_like(bound, device="meta")  # type: ignore[assignment]

    def replace(self, name: str, linear: nn.Module) -> None:
        """Put `linear` in the place of the nn.Linear whose weight is called `name`."""
        old, _ = self._homes.pop(name)
        for layer in self.layers:
            for parent in layer.modules():
                for attribute, child in parent.named_children():
                    if child is old:
                        setattr(parent, attribute, linear)
                        return
        raise AssertionError(f"{name} has no parent module")

    def run_layer(
        self, index: int, hidden: torch.Tensor, riders: Riders, rotary: Mapping[str, Rotary]
    ) -> torch.Tensor:
        """hidden (1, rows, hidden) through layer `index`; `rotary` is keyed by kind."""
        kind = self.architecture.ropes[index]
        turn = None if kind is None else rotary[kind]
        out = self.layers[index](
            hidden, attention_mask=None, position_embeddings=turn, riders=riders
        )
        # Older releases of transformers return a tuple.
        return out[0] if isinstance(out, tuple) else out

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm: (rows, hidden) -> (rows, hidden)."""
        return self.norm(hidden)


def turn(rope: Rope, positions: torch.Tensor, total: int, dtype: torch.dtype) -> dict[str, Rotary]:
    """cos and sin of every kind of rotary table, each (1, rows, dim); see rope.cos_sin."""
    pairs = {kind: cos_sin(rope, positions, kind, total, dtype) for kind in rope.tables}
    return {kind: (cos[None], sin[None]) for kind, (cos, sin) in pairs.items()}


def describe(skeleton: Skeleton, checkpoint: Checkpoint, compute_itemsize: int) -> ModelShape:
    """The sizes a planner needs. Raises ModelFormatError when the files lack a tensor."""
    config, architecture = skeleton.config, skeleton.architecture

    def matrix(name: str, layer: int, shape: Iterable[int]) -> MatrixShape:
        spec = _require(checkpoint, name, tuple(shape))
        return MatrixShape(name, layer, spec.shape[0], spec.shape[1], spec.nbytes)

    layers = tuple(
        LayerShape(i, tuple(matrix(n, i, s) for n, s in skeleton.matrices(i).items()))
        for i in range(config.num_hidden_layers)
    )
    small = 0
    for name, shape in skeleton.small().items():
        _require(checkpoint, name, tuple(shape))
        small += shape.numel() * compute_itemsize
    embedding = (config.vocab_size, config.hidden_size)
    rows = architecture.embedding_name(checkpoint.tensors)
    _require(checkpoint, rows, embedding)
    name = architecture.head_name(checkpoint.tensors)
    head = matrix(name, config.num_hidden_layers, embedding)
    return ModelShape(
        architecture=architecture.model_type,
        layers=layers,
        small_bytes=small,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        head=head,
        tied=name == rows,
        source_itemsize=head.nbytes // (head.rows * head.cols),
        compute_itemsize=compute_itemsize,
        max_positions=config.max_position_embeddings,
    )


def _require(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> TensorSpec:
    spec = checkpoint.spec(name)
    if tuple(spec.shape) != shape:
        raise ModelFormatError(
            spec.path, f"{name} has shape {tuple(spec.shape)}, but config.json implies {shape}"
        )
    return spec
