"""Operators with a state of fixed size: short causal convolutions, and linear attention by a recurrence.

The caller owns the states and knows where one sequence ends and the next begins. An operator asks it for the values
before each token (`FixedState.window`) or for a run over each sequence's tokens (`FixedState.scan`), so a packed step
can't mix sequences, even where the graph itself has no notion of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.ops.norm import sum_last
from onnx_import.protocols import FixedState
from onnx_import.registry import (
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
)

Results = tuple[jax.Array | None, ...]

_RULES = ("linear", "gated", "delta", "gated_delta")


def _owner(env: Environment) -> FixedState:
    if env.fixed is None:
        raise ValueError("the decoder has fixed states; give Decoder.apply a FixedState")
    return env.fixed


def _convolve(call: Call, args: Arguments, env: Environment, rows: jax.Array) -> jax.Array:
    """The causal depthwise convolution of rows [tokens, channels], in float32, activation included.

    With d the dilation, tap j of k reads the value (k - 1 - j) d tokens back (com.microsoft CausalConvWithState).
    """
    spec = call.fixed
    assert spec is not None
    weight, dilation = args["weight"][:, 0].astype(jnp.float32), call.attributes["dilation"]
    past, env.staged_fixed[spec.name] = _owner(env).window(spec, rows.astype(spec.dtype))
    total = rows.astype(jnp.float32) * weight[:, -1]
    for tap in range(weight.shape[1] - 1):
        total = total + past[:, :, tap * dilation].astype(jnp.float32) * weight[:, tap]
    if args["bias"] is not None:
        total = total + args["bias"].astype(jnp.float32)
    return total if call.attributes["activation"] == "none" else total * jax.nn.sigmoid(total)


def _channels_first(call: Call, args: Arguments, env: Environment) -> Results:
    """input [1, channels, tokens], weight [channels, 1, k], bias [channels]: output like input."""
    x = args["input"]
    return _convolve(call, args, env, x[0].T).T[None].astype(x.dtype), None


def _token_major(call: Call, args: Arguments, env: Environment) -> Results:
    """input [tokens, channels], weight [channels, 1, k], bias [channels]: output like input."""
    x = args["input"]
    rows = x.reshape(-1, x.shape[-1])
    return _convolve(call, args, env, rows).reshape(x.shape).astype(x.dtype), None


def _check_convolution(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    shape = tensors["weight"].shape if "weight" in tensors else ()
    if len(shape) != 3 or shape[1] != 1:
        yield f"{call.node.label} has a weight of shape {list(shape)}; [channels, 1, k] is supported"
    elif call.fixed is not None:
        wanted = (shape[0], (shape[2] - 1) * call.attributes["dilation"])
        if call.fixed.shape != wanted:
            yield f"{call.node.label} has a state of shape {list(call.fixed.shape)}; its weight asks for {list(wanted)}"


@dataclass(frozen=True)
class DeltaStep:
    """One token of linear attention, for [rows] sequences; com.microsoft LinearAttention defines the rules.

        S = exp(g) S + beta k (v - exp(g) S^T k)^T        o = scale S^T q

    without the decay where no g is given ("linear" and "delta"), and without the retrieval where no beta is ("linear"
    and "gated"). `transposed` states are [rows, heads, value, key], others [rows, heads, key, value]. Heads of q and k
    are repeated to those of the state; more heads of q than of the state share it.
    """

    scale: float
    transposed: bool

    def __call__(self, state: jax.Array, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """state as above, inputs q, k, v [rows, heads, dim], g [rows, heads, 1 or key], beta [rows, heads, 1]."""
        memory = state.astype(jnp.float32)
        if self.transposed:
            memory = memory.swapaxes(2, 3)
        heads = memory.shape[1]
        query, key, value = inputs["q"], inputs["k"], inputs["v"]
        key = jnp.repeat(key, heads // key.shape[1], axis=1)
        if "g" in inputs:
            memory = memory * jnp.exp(inputs["g"])[..., None]
        if "beta" in inputs:
            value = inputs["beta"] * (value - _read(memory, key))
        memory = memory + key[..., None] * value[:, :, None]
        if query.shape[1] <= heads:
            read = _read(memory, jnp.repeat(query, heads // query.shape[1], axis=1))
        else:
            read = _read(jnp.repeat(memory, query.shape[1] // heads, axis=1), query)
        if self.transposed:
            memory = memory.swapaxes(2, 3)
        return memory.astype(state.dtype), self.scale * read


def _read(memory: jax.Array, key: jax.Array) -> jax.Array:
    """float32 [rows, heads, value]: memory [rows, heads, key, value] at key [rows, heads, key]."""
    # A product of one row goes another way through XLA on CPU, with other bits.
    twice = jnp.stack((key, key), axis=2)
    return jnp.einsum("rhqk,rhkv->rhqv", twice, memory, preferred_element_type=jnp.float32)[:, :, 0]


def _recur(
    call: Call,
    env: Environment,
    inputs: dict[str, jax.Array],
    decay: jax.Array | None,
    beta: jax.Array | None,
    *,
    transposed: bool,
) -> jax.Array:
    """Outputs float32 [tokens, heads, value]; inputs, decay and beta as `DeltaStep` takes them."""
    spec, rule, scale = call.fixed, call.attributes["update_rule"], call.attributes["scale"]
    assert spec is not None
    given = (("g", decay, "gated" in rule), ("beta", beta, "delta" in rule))
    inputs = inputs | {name: value for name, value, used in given if used and value is not None}
    step = DeltaStep(scale or 1 / math.sqrt(inputs["q"].shape[-1]), transposed)
    outputs, env.staged_fixed[spec.name] = _owner(env).scan(spec, step, inputs)
    return outputs


def _heads(x: jax.Array, width: int) -> jax.Array:
    """x [..., heads * width] as float32 [tokens, heads, width]."""
    return x.reshape(-1, x.shape[-1] // width, width).astype(jnp.float32)


def _linear_attention(call: Call, args: Arguments, env: Environment) -> Results:
    """query [1, tokens, q heads * key], key and value alike: output [1, tokens, heads * value].

    decay is [1, tokens, heads or heads * key], beta [1, tokens, heads or 1]; states are [heads, key, value].
    """
    query = args["query"]
    key_dim, heads = query.shape[-1] // call.attributes["q_num_heads"], call.attributes["kv_num_heads"]
    inputs = {
        "q": _heads(query, key_dim),
        "k": _heads(args["key"], key_dim),
        "v": _heads(args["value"], args["value"].shape[-1] // heads),
    }
    decay, beta = (
        None if given is None else _heads(given, max(given.shape[-1] // heads, 1))
        for given in (args["decay"], args["beta"])
    )
    outputs = _recur(call, env, inputs, decay, beta, transposed=False)
    return outputs.reshape(*query.shape[:-1], -1).astype(query.dtype), None


def _check_linear(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    yield from _check_rule(call, 4, 5)
    q_heads, heads = call.attributes["q_num_heads"], call.attributes["kv_num_heads"]
    if call.fixed is not None and (len(call.fixed.shape) != 3 or call.fixed.shape[0] != heads):
        yield f"{call.node.label} has a state of shape {list(call.fixed.shape)}; [{heads}, key, value] is supported"
    if q_heads % heads and heads % q_heads:
        yield f"{call.node.label} has {q_heads} query heads for {heads} key heads; one should divide the other"


def _check_rule(call: Call, decay: int, beta: int) -> Iterator[str]:
    rule = call.attributes["update_rule"]
    for index, name, needed in ((decay, "decay", "gated" in rule), (beta, "beta", "delta" in rule)):
        if needed and not (index < len(call.node.inputs) and call.node.inputs[index]):
            yield f"{call.node.label} has update_rule={rule!r} and no input {name!r}"


def _gate(call: Call, args: Arguments, env: Environment) -> Results:
    """a and b [..., heads], dt_bias and decay_scale [heads]: decay and beta like a.

    decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b), in float32 (com.microsoft LinearAttentionGate).
    """
    a, b = args["a"], args["b"]
    decay = args["decay_scale"] * jax.nn.softplus(a.astype(jnp.float32) + args["dt_bias"])
    beta = None if b is None else jax.nn.sigmoid(b.astype(jnp.float32)).astype(b.dtype)
    return decay.astype(a.dtype), beta


def _delta_net(call: Call, args: Arguments, env: Environment) -> Results:
    """query and key [..., tokens, heads, key], value [..., tokens, value heads, value]: output like value.

    decay is [..., tokens, value heads] or has an axis for key behind, beta [..., tokens, value heads]; states are
    [value heads, value, key].
    """
    inputs = {
        name: args[source].reshape(-1, *args[source].shape[-2:]).astype(jnp.float32)
        for name, source in (("q", "query"), ("k", "key"), ("v", "value"))
    }
    if call.attributes["qk_l2_norm"]:
        inputs.update((name, _unit(inputs[name])) for name in "qk")
    tokens, heads = inputs["v"].shape[:2]
    decay, beta = (
        None if given is None else given.reshape(tokens, heads, -1).astype(jnp.float32)
        for given in (args["decay"], args["beta"])
    )
    kind = call.attributes["gate_activation"]
    if decay is not None and kind != "none":
        rate, biased = jnp.exp(args["a_log"])[:, None], decay + args["dt_bias"].reshape(heads, -1)
        if kind in ("softplus", "qwen"):
            decay = -rate * jax.nn.softplus(biased)
        else:
            decay = call.attributes["gate_lower_bound"] * jax.nn.sigmoid(rate * biased)
    if beta is not None and call.attributes["beta_activation"] == "sigmoid":
        beta = jax.nn.sigmoid(beta)
    outputs = _recur(call, env, inputs, decay, beta, transposed=True)
    value = args["value"]
    return outputs.reshape(value.shape).astype(value.dtype), None


def _unit(x: jax.Array) -> jax.Array:
    """x [tokens, heads, dim] float32 with each head's vector at length one; 1e-12 is added to the squared length.

    The operator's definition names no such number; this is that of ONNX Runtime's kernel on CPU.
    """
    rows = x.reshape(-1, x.shape[-1])
    return (rows * jax.lax.rsqrt(sum_last(jnp.square(rows)) + 1e-12)).reshape(x.shape)


def _check_delta_net(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    yield from _check_rule(call, 4, 5)
    names = dict(zip((rule.name for rule in _DELTA_NET_INPUTS), call.node.inputs, strict=False))
    if call.attributes["gate_activation"] != "none":
        for name in ("a_log", "dt_bias", "decay"):
            if not names.get(name):
                yield f"{call.node.label} has gate_activation={call.attributes['gate_activation']!r} and no {name!r}"
    if call.fixed is not None and len(call.fixed.shape) != 3:
        yield f"{call.node.label} has a state of shape {list(call.fixed.shape)}; [heads, value, key] is supported"


def _optional(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, optional=True) for name in names)


def _refused(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, Role.REFUSED) for name in names)


_ACTIVATION = Attribute("none", only=("none", "silu", "swish"))
_HINT = {"chunk_size": Attribute(64)}
"""How a runtime may cut long inputs; it changes no result."""
_LINEAR_INPUTS = (
    *(Input(name) for name in ("query", "key", "value")),
    Input("past_state", Role.UNREAD),
    *_optional("decay", "beta"),
)
_DELTA_NET_INPUTS = (
    *(Input(name) for name in ("query", "key", "value")),
    Input("cu_seqlens", Role.UNREAD),
    *_optional("decay", "beta"),
    Input("initial_state", Role.UNREAD),
    *_optional("a_log", "dt_bias"),
    *_refused("capture_count", "state_update_active"),
)


def _only(value: Any) -> Attribute:
    return Attribute(value, only=(value,))


OPERATORS = (
    Operator(
        "com.microsoft",
        "CausalConvWithState",
        1,
        (Input("input"), Input("weight"), *_optional("bias"), Input("past_state", Role.UNREAD)),
        {
            "activation": _ACTIVATION,
            "dilation": Attribute(1),
            "ndim": _only(1),
            "channels_last": _only(0),
            "state_window": _only(0),
            "state_length": _only(0),
            "state_channels_last": Attribute(-1, only=(-1, 0)),
            "state_update_capacity": _only(0),
            "input_channels": _only(0),
            "input_channel_offset": _only(0),
        },
        _channels_first,
        caches=(1,),
        state=3,
        batched=True,
        check=_check_convolution,
    ),
    Operator(
        "com.microsoft",
        "VarlenCausalConvWithState",
        1,
        (
            Input("input"),
            Input("weight"),
            Input("cumulative_sequence_length", Role.UNREAD),
            *_optional("bias"),
            Input("initial_state", Role.UNREAD),
            *_refused("capture_count", "kernel_delta", "previous_mask"),
        ),
        {
            "activation": _ACTIVATION,
            "dilation": Attribute(1),
            "state_update_capacity": _only(0),
            "group_size": _only(1),
            "delta_offset": _only(0),
        },
        _token_major,
        caches=(1,),
        state=4,
        check=_check_convolution,
    ),
    Operator(
        "com.microsoft",
        "LinearAttention",
        1,
        _LINEAR_INPUTS,
        {
            **_HINT,
            "q_num_heads": Attribute(),
            "kv_num_heads": Attribute(),
            "scale": Attribute(0.0),
            "update_rule": Attribute("gated_delta", only=_RULES),
            "state_window": _only(0),
        },
        _linear_attention,
        caches=(1,),
        state=3,
        batched=True,
        check=_check_linear,
    ),
    Operator(
        "com.microsoft",
        "LinearAttentionGate",
        1,
        (Input("a"), Input("dt_bias"), Input("decay_scale"), *_optional("b")),
        {},
        _gate,
        outputs=(0, 1),
    ),
    Operator(
        "com.microsoft",
        "GatedDeltaNet",
        1,
        _DELTA_NET_INPUTS,
        {
            **_HINT,
            "update_rule": Attribute("gated_delta", only=_RULES),
            "scale": Attribute(0.0),
            "gate_activation": Attribute("none", only=("none", "softplus", "qwen", "sigmoid", "kda")),
            "beta_activation": Attribute("none", only=("none", "sigmoid")),
            "gate_lower_bound": Attribute(-5.0),
            "qk_l2_norm": Attribute(0, only=(0, 1)),
            "state_update_capacity": _only(0),
        },
        _delta_net,
        caches=(1,),
        state=6,
        check=_check_delta_net,
    ),
)
