"""Constants that a graph holds as integers and dequantises itself (DequantizeLinear): done once, on loading.

Formula of ONNX DequantizeLinear: (x - zero point) * scale, with one scale for all, one a slice of `axis`, or one for
`block_size` neighbours along it.
"""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.registry import (
    FLOATS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
    WeightPlan,
)

_CODES = frozenset(("int8", "uint8", "int4", "uint4"))


def dequantise_linear(
    codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, axis: int, block_size: int
) -> np.ndarray:
    """Floats of the codes' shape and the scale's type, computed in float32 and rounded once."""
    values = codes.astype(np.float32)
    if zero_point is not None:
        values = values - _spread(zero_point.astype(np.float32), values.shape, axis, block_size)
    return (values * _spread(scale.astype(np.float32), values.shape, axis, block_size)).astype(scale.dtype)


def _spread(factors: np.ndarray, shape: tuple[int, ...], axis: int, block_size: int) -> np.ndarray:
    """Factors brought to a shape that broadcasts with the codes'."""
    if block_size:
        return np.repeat(factors, block_size, axis=axis).take(np.arange(shape[axis]), axis=axis)
    if factors.size == 1:
        return factors.reshape(())
    return factors.reshape([-1 if place == axis else 1 for place in range(len(shape))])


def _weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    x, scale = tensors["x"], tensors["x_scale"]
    sources = tuple(tensors[name] for name in ("x", "x_scale", "x_zero_point") if name in tensors)
    axis, block_size = call.attributes["axis"] % max(len(x.shape), 1), call.attributes["block_size"]

    def build(codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None = None) -> np.ndarray:
        return dequantise_linear(codes, scale, zero_point, axis, block_size)

    key = f"{'+'.join(source.key for source in sources)}:linear({axis},{block_size})"
    return {"x": WeightPlan(key, jax.ShapeDtypeStruct(x.shape, scale.dtype), sources, build)}


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    return (args["x"],)


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    x, label, size = tensors["x"], call.node.label, call.attributes["block_size"]
    rank, axis = len(x.shape), call.attributes["axis"]
    zero = tensors.get("x_zero_point")
    if zero is not None and zero.dtype != x.dtype:
        yield f"{label} has x_zero_point of type {zero.dtype.name} for x of type {x.dtype.name}"
    single = size == 0 and np.prod(tensors["x_scale"].shape) == 1
    if size < 0 or (not single and not -rank <= axis < rank):
        yield f"{label} has axis={axis} and block_size={size} for x of shape {list(x.shape)}"
        return
    expected: list[int] = []
    if size:
        expected = [-(-n // size) if place == axis % rank else n for place, n in enumerate(x.shape)]
    elif not single:
        expected = [x.shape[axis]]
    for name in ("x_scale", "x_zero_point"):
        found = list(tensors[name].shape) if name in tensors else expected
        if found != expected and not (single and found == [1]):
            yield f"{label} needs {name} of shape {expected}, but its shape is {found}"


OPERATORS = (
    Operator(
        "",
        "DequantizeLinear",
        10,
        (
            Input("x", Role.WEIGHT, dtypes=_CODES),
            Input("x_scale", Role.WEIGHT, dtypes=FLOATS),
            Input("x_zero_point", Role.WEIGHT, optional=True, dtypes=_CODES),
        ),
        {"axis": Attribute(1), "block_size": Attribute(0), "output_dtype": Attribute(0, only=(0,))},
        _run,
        weights=_weights,
        check=_check,
    ),
)
