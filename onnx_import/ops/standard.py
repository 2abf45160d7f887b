"""Element-wise and shape operators of the standard domain, as decoders use them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from onnx_import.registry import (
    FLOATS,
    INTEGERS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
)

Results = tuple[jax.Array | None, ...]

_CAST_TARGETS = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    # Token counts and positions fit 32 bits, and JAX has no 64-bit integers by default.
    onnx.TensorProto.INT64: np.dtype(np.int32),
}


def _binary(op_type: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> Operator:
    def run(call: Call, args: Arguments, env: Environment) -> Results:
        return (function(args["A"], args["B"]),)

    return Operator("", op_type, 7, (Input("A"), Input("B")), {}, run)


def _unary(op_type: str, since: int, function: Callable[[jax.Array], jax.Array]) -> Operator:
    def run(call: Call, args: Arguments, env: Environment) -> Results:
        return (function(args["X"]),)

    return Operator("", op_type, since, (Input("X"),), {}, run)


def _cast(call: Call, args: Arguments, env: Environment) -> Results:
    return (args["input"].astype(_CAST_TARGETS[call.attributes["to"]]),)


def _reshape(call: Call, args: Arguments, env: Environment) -> Results:
    data, target = args["data"], call.statics["shape"]
    # A zero copies the input's size at the same place (ONNX Reshape, allowzero=0).
    return (data.reshape([data.shape[i] if size == 0 else size for i, size in enumerate(target)]),)


def _split(call: Call, args: Arguments, env: Environment) -> Results:
    data, axis = args["input"], call.attributes["axis"]
    sizes = call.statics.get("split")
    if sizes is None:
        return tuple(jnp.split(data, len(call.node.outputs), axis=axis))
    return tuple(jnp.split(data, np.cumsum(sizes)[:-1].tolist(), axis=axis))


def _slice(call: Call, args: Arguments, env: Environment) -> Results:
    data, statics = args["data"], call.statics
    axes = statics.get("axes", tuple(range(len(statics["starts"]))))
    steps = statics.get("steps", (1,) * len(axes))
    index = [slice(None)] * data.ndim
    for start, end, axis, step in zip(statics["starts"], statics["ends"], axes, steps, strict=True):
        index[axis] = slice(start, end, step)
    return (data[tuple(index)],)


def _gather(call: Call, args: Arguments, env: Environment) -> Results:
    # `fill` makes an id past the table a row of NaN, which is noticed, where the default would clamp.
    return (jnp.take(args["data"], args["indices"], axis=0, mode="fill"),)


def _static(name: str, *, optional: bool = False) -> Input:
    return Input(name, Role.STATIC, optional, INTEGERS)


OPERATORS = (
    _binary("Add", jnp.add),
    _binary("Sub", jnp.subtract),
    _binary("Mul", jnp.multiply),
    _binary("Div", jnp.divide),
    _unary("Sigmoid", 6, jax.nn.sigmoid),
    _unary("Tanh", 6, jnp.tanh),
    Operator("", "Cast", 9, (Input("input"),), {"to": Attribute(only=tuple(_CAST_TARGETS))}, _cast),
    Operator(
        "", "Reshape", 5, (Input("data"), _static("shape")), {"allowzero": Attribute(0, only=(0,))}, _reshape
    ),
    Operator(
        "",
        "Split",
        13,
        (Input("input"), _static("split", optional=True)),
        {"axis": Attribute(0), "num_outputs": Attribute(None)},
        _split,
        outputs=tuple(range(8)),
    ),
    Operator(
        "",
        "Slice",
        10,
        (
            Input("data"),
            _static("starts"),
            _static("ends"),
            _static("axes", optional=True),
            _static("steps", optional=True),
        ),
        {},
        _slice,
    ),
    Operator(
        "",
        "Gather",
        1,
        (Input("data", dtypes=FLOATS), Input("indices", dtypes=INTEGERS)),
        {"axis": Attribute(0, only=(0,))},
        _gather,
    ),
)
