"""All implemented operators, one module a family."""

from onnx_import.ops import (
    activations,
    attention,
    dense_attention,
    dequantize,
    elementwise,
    embedding,
    gated,
    indexing,
    layer_norm,
    matmul,
    moe,
    multi_head,
    norm,
    normalization,
    onnx_attention,
    quantized,
    recurrence,
    reductions,
    rotary,
    shapes,
    tables,
)
from onnx_import.registry import Registry

_OPERATORS = (
    *activations.OPERATORS,
    *attention.OPERATORS,
    *dequantize.OPERATORS,
    *elementwise.OPERATORS,
    *embedding.OPERATORS,
    *gated.OPERATORS,
    *indexing.OPERATORS,
    *layer_norm.OPERATORS,
    *matmul.OPERATORS,
    *moe.OPERATORS,
    *multi_head.OPERATORS,
    *norm.OPERATORS,
    *normalization.OPERATORS,
    *quantized.OPERATORS,
    *recurrence.OPERATORS,
    *reductions.OPERATORS,
    *rotary.OPERATORS,
    *shapes.OPERATORS,
    *tables.OPERATORS,
)

REGISTRY = Registry((*_OPERATORS, *onnx_attention.OPERATORS))
"""What a decoder may use, whose activations hold the tokens of all requests."""

WHOLE = Registry((*_OPERATORS, *indexing.CACHE_OPERATORS, *dense_attention.OPERATORS))
"""What a graph may use whose activations hold their own batch: also attention and cache writes by the operator."""
