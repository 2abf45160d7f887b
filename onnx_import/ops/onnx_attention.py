"""The standard domain's Attention where it keeps a cache: its past is a graph input, so the caller's attention runs it.

Without a past as graph input it is an operator like any other, of its inputs alone.
"""

from collections.abc import Iterator, Mapping

import jax

from onnx_import.graph import Tensor
from onnx_import.ops.attention import attend
from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator, Role


def _heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[tokens, heads, head_dim] from [1, tokens, heads * head_dim] or [1, heads, tokens, head_dim]."""
    if x.ndim == 4:
        return x[0].transpose(1, 0, 2)
    return x.reshape(-1, num_heads, x.shape[-1] // num_heads)


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    attributes, shape = call.attributes, args["Q"].shape
    query = _heads(args["Q"], attributes["q_num_heads"])
    key, value = (_heads(args[name], attributes["kv_num_heads"]) for name in ("K", "V"))
    softcap = attributes["softcap"] or None
    output = attend(call, env, query, key, value, scale=attributes["scale"], softcap=softcap)
    if len(shape) == 4:
        output = output.reshape(query.shape).transpose(1, 0, 2)
    return output.reshape(shape), None, None


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    attributes = call.attributes
    if attributes["is_causal"] != 1:
        yield f"{call.node.label} has is_causal=0, which isn't supported in a decoder"
    if attributes["softcap"] < 0:
        yield f"{call.node.label} has softcap={attributes['softcap']}, which isn't supported"


_INPUTS = (
    *(Input(name) for name in ("Q", "K", "V")),
    Input("attn_mask", Role.REFUSED),
    *(Input(name, Role.UNREAD) for name in ("past_key", "past_value")),
)
_ATTRIBUTES = {
    "is_causal": Attribute(0),
    "q_num_heads": Attribute(1),
    "kv_num_heads": Attribute(1),
    "scale": Attribute(0.0),
    "softcap": Attribute(0.0),
    # Scores are float32 here, at least as precise as asked.
    "softmax_precision": Attribute(None, only=(1, 10)),
    "qk_matmul_output_mode": Attribute(0),
}

OPERATORS = (
    Operator("", "Attention", 23, _INPUTS, _ATTRIBUTES, _run, caches=(1, 2), key_cache=4, check=_check),
    Operator(
        "",
        "Attention",
        24,
        (*_INPUTS, Input("nonpad_kv_seqlen", Role.REFUSED)),
        _ATTRIBUTES,
        _run,
        caches=(1, 2),
        key_cache=4,
        check=_check,
    ),
)
