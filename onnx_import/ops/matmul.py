"""Products of activations with a float weight.

Weights lie `[out, in]` and are contracted on the last axis of both sides, with float32 accumulation.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.registry import Arguments, Call, Environment, Input, Operator, Role, WeightPlan


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], accumulated in float32, in x's dtype: [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(
        rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    return {"B": WeightPlan.plain(tensors["B"].transpose())}


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if len(tensors["B"].shape) != 2:
        yield f"{call.node.label} has a weight of shape {list(tensors['B'].shape)}; only rank two is supported"


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    return (contract(args["A"], args["B"]),)


OPERATORS = (
    Operator("", "MatMul", 1, (Input("A"), Input("B", Role.WEIGHT)), {}, _run, weights=_weights, check=_check),
)
