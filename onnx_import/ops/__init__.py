"""All implemented operators, one module a family."""

from onnx_import.ops import attention, embedding, matmul, norm, quantized, recurrence, standard
from onnx_import.registry import Registry

REGISTRY = Registry(
    (
        *standard.OPERATORS,
        *matmul.OPERATORS,
        *norm.OPERATORS,
        *embedding.OPERATORS,
        *attention.OPERATORS,
        *quantized.OPERATORS,
        *recurrence.OPERATORS,
    )
)
