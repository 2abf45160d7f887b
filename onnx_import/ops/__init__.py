"""All implemented operators, one module a family."""

from onnx_import.ops import (
    attention,
    embedding,
    matmul,
    multi_head,
    norm,
    onnx_attention,
    quantized,
    recurrence,
    standard,
)
from onnx_import.registry import Registry

REGISTRY = Registry(
    (
        *standard.OPERATORS,
        *matmul.OPERATORS,
        *norm.OPERATORS,
        *embedding.OPERATORS,
        *attention.OPERATORS,
        *multi_head.OPERATORS,
        *onnx_attention.OPERATORS,
        *quantized.OPERATORS,
        *recurrence.OPERATORS,
    )
)
