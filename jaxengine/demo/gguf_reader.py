"""A llama GGUF file as values: its shape, its tokenizer's tables, its tensors still in their stored bytes.

Nothing is dequantised and no tensor is copied here: tensors are views of a memory map.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxengine.demo.errors import DemoModelError

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a token that is never made from text


@dataclass(frozen=True)
class LlamaShape:
    """Sizes and constants of a llama decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_epsilon: float


@dataclass(frozen=True)
class TokenizerTables:
    """A byte-level BPE tokenizer as GGUF stores it; a token's id is its index in `tokens`."""

    pre_tokenizer: str
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int
    unk_id: int | None
    pad_id: int | None
    chat_template: str

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the declared end of turn first, then `<|endoftext|>` where the file has it."""
        others = [i for i in self.control_ids if self.tokens[i] == "<|endoftext|>" and i != self.eos_id]
        return (self.eos_id, *others)


@dataclass(frozen=True)
class GgufTensor:
    """One stored tensor.

    `kind` is the GGML type's name. `data` is float32 [n] for a vector of kind F32, and uint8 [rows, bytes a row]
    for a matrix of a block-quantised kind, its rows being output features.
    """

    name: str
    kind: str
    data: NDArray[Any]

    def with_rows(self, order: NDArray[np.intp]) -> "GgufTensor":
        """The same matrix with row i taken from row order[i]."""
        return GgufTensor(self.name, self.kind, self.data[order])

    def dequantised(self) -> NDArray[np.float32]:
        """The tensor as float32, by the gguf package's own arithmetic: [n], or [rows, columns]."""
        gguf = import_gguf()
        kind = gguf.GGMLQuantizationType[self.kind]
        return np.asarray(gguf.quants.dequantize(self.data, kind), np.float32)


@dataclass(frozen=True)
class GgufModel:
    """A llama model read from a GGUF file."""

    shape: LlamaShape
    tokenizer: TokenizerTables
    tensors: Mapping[str, GgufTensor]

    def tensor(self, name: str, kind: str) -> GgufTensor:
        """The tensor `name`, which must be stored as `kind`.

        Raises:
            DemoModelError: it is absent or of another kind.
        """
        found = self.tensors.get(name)
        if found is None or found.kind != kind:
            what = "is missing" if found is None else f"is stored as {found.kind}"
            raise DemoModelError(f"Tensor {name} {what} in the GGUF file, where {kind} is needed.")
        return found


def import_gguf() -> ModuleType:
    """The gguf package, which only the making of the demo model needs.

    Raises:
        DemoModelError: it isn't installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise DemoModelError(
            "The demo model needs the gguf package: run `pip install 'jaxengine[demo]'`."
        ) from error


def read_gguf(path: Path) -> GgufModel:
    """Read the llama model in the GGUF file `path`.

    Raises:
        DemoModelError: the gguf package is missing, or the file isn't a llama GGUF with a byte-level BPE tokenizer.
    """
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise DemoModelError(f"{path} can't be read as a GGUF file: {error}.") from error

    def field(key: str) -> Any:
        stored = reader.get_field(key)
        return None if stored is None else stored.contents()

    return GgufModel(
        shape=_shape(field),
        tokenizer=_tokenizer(field),
        tensors={t.name: GgufTensor(t.name, t.tensor_type.name, t.data) for t in reader.tensors},
    )


def interleaved_to_halves(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Row order that turns GGUF's q or k projection into the one for rotation of halves.

    GGUF stores row 2i+j of a head where the original has row j*head_dim/2 + i, so that llama.cpp may rotate neighbours
    (`LlamaModel.permute` in its convert_hf_to_gguf.py); the builder's graphs rotate halves.

    Returns:
        intp [heads * head_dim]: for each row wanted, the row to take.
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _shape(field: Callable[[str], Any]) -> LlamaShape:
    if (architecture := field("general.architecture")) != "llama":
        raise DemoModelError(f"The GGUF file holds a {architecture} model, where a llama model is needed.")
    hidden = _required(field, "llama.embedding_length")
    heads = _required(field, "llama.attention.head_count")
    head_dim = hidden // heads
    if (rotary := field("llama.rope.dimension_count")) not in (None, head_dim):
        raise DemoModelError(
            f"The GGUF file rotates {rotary} of {head_dim} columns a head; only all are supported."
        )
    return LlamaShape(
        layers=_required(field, "llama.block_count"),
        heads=heads,
        kv_heads=_required(field, "llama.attention.head_count_kv"),
        head_dim=head_dim,
        hidden=hidden,
        intermediate=_required(field, "llama.feed_forward_length"),
        vocab_size=len(_required(field, "tokenizer.ggml.tokens")),
        context_length=_required(field, "llama.context_length"),
        rope_theta=float(_required(field, "llama.rope.freq_base")),
        rms_epsilon=float(_required(field, "llama.attention.layer_norm_rms_epsilon")),
    )


def _tokenizer(field: Callable[[str], Any]) -> TokenizerTables:
    if (model := field("tokenizer.ggml.model")) != "gpt2":
        raise DemoModelError(f"The GGUF file has a {model} tokenizer; a byte-level BPE one (gpt2) is needed.")
    merges = [tuple(merge.split(" ")) for merge in _required(field, "tokenizer.ggml.merges")]
    types = _required(field, "tokenizer.ggml.token_type")
    return TokenizerTables(
        pre_tokenizer=_required(field, "tokenizer.ggml.pre"),
        tokens=tuple(_required(field, "tokenizer.ggml.tokens")),
        merges=tuple((left, right) for left, right in merges),
        control_ids=tuple(i for i, kind in enumerate(types) if kind == CONTROL_TOKEN),
        bos_id=field("tokenizer.ggml.bos_token_id"),
        eos_id=_required(field, "tokenizer.ggml.eos_token_id"),
        unk_id=field("tokenizer.ggml.unknown_token_id"),
        pad_id=field("tokenizer.ggml.padding_token_id"),
        chat_template=_required(field, "tokenizer.chat_template"),
    )


def _required(field: Callable[[str], Any], key: str) -> Any:
    value = field(key)
    if value is None:
        raise DemoModelError(f"The GGUF file has no {key}.")
    return value
