"""All implemented operators, one module a family."""

from onnx_import.ops import (
    activations,
    attention,
    dequantize,
    embedding,
    gated,
    layer_norm,
    matmul,
    moe,
    multi_head,
    norm,
    onnx_attention,
    quantized,
    recurrence,
    standard,
    tables,
)
from onnx_import.registry import Registry

REGISTRY = Registry(
    (
        *activations.OPERATORS,
        *attention.OPERATORS,
        *dequantize.OPERATORS,
        *embedding.OPERATORS,
        *gated.OPERATORS,
        *layer_norm.OPERATORS,
        *matmul.OPERATORS,
        *moe.OPERATORS,
        *multi_head.OPERATORS,
        *norm.OPERATORS,
        *onnx_attention.OPERATORS,
        *quantized.OPERATORS,
        *recurrence.OPERATORS,
        *standard.OPERATORS,
        *tables.OPERATORS,
    )
)
