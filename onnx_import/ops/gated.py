"""Gated sums and norms of hybrid and mixture-of-experts decoders.

GatedRMSNorm: x / sqrt(mean(x**2) + epsilon) * scale * act(gate) over groups as wide as `scale`, with act silu
(z sigmoid(z)) or sigmoid. GatedAdd: x + y gate, where gate is one number a row, or the sigmoid of a projection.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.ops.matmul import contract, dense_struct, dense_weight
from onnx_import.ops.norm import rms_norm
from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator, Role, WeightPlan

_GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


def _norm(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    x, scale = args["X"], args["scale"]
    groups = x.reshape(-1, scale.shape[0]).astype(jnp.float32)
    gate = _GATES[call.attributes["activation"]](args["gate"].reshape(groups.shape).astype(jnp.float32))
    normal = rms_norm(groups, scale, call.attributes["epsilon"]) * gate
    return (normal.astype(x.dtype).reshape(x.shape),)


def _add(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    gate = args["gate"]
    if args["gate_weight"] is not None:
        gate = jax.nn.sigmoid(contract(gate, args["gate_weight"]).astype(jnp.float32)).astype(gate.dtype)
    return (args["X"] + args["Y"] * gate,)


def _add_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    if "gate_weight" not in tensors:
        return {}
    tensor = tensors["gate_weight"].transpose()
    rows, columns = tensor.shape
    struct = dense_struct(rows, columns, tensor.dtype)
    return {"gate_weight": WeightPlan(f"{tensor.key}:dense", struct, (tensor,), dense_weight)}


OPERATORS = (
    Operator(
        "com.microsoft",
        "GatedRMSNorm",
        1,
        (Input("X"), Input("scale"), Input("gate")),
        {"epsilon": Attribute(1e-5), "activation": Attribute("silu", only=tuple(_GATES))},
        _norm,
    ),
    Operator(
        "com.microsoft",
        "GatedAdd",
        1,
        (Input("X"), Input("Y"), Input("gate"), Input("gate_weight", Role.WEIGHT, optional=True)),
        {},
        _add,
        weights=_add_weights,
    ),
)
