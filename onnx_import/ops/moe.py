"""MoE and QMoE: a router's choice of experts, each of them two or three products with an activation between.

With x a token: act(fc1 x) goes through fc2, or act(fc1 x) * (fc3 x) where there is an fc3. A gated activation takes
gate and linear part from one fc1, interleaved (swiglu_fusion=1) or as halves (2), or from fc1 and fc3 (0):
swiglu = G sigmoid(alpha G) (L + beta), where G = min(gate, limit) and L = clip(linear, -limit, limit), and
geglu = gelu(gate) linear.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.ops.activations import fast_gelu
from onnx_import.ops.experts import (
    dense_experts,
    dense_experts_struct,
    expert_matmul,
    mix,
    mixing_weights,
    quantised_experts,
    quantised_experts_struct,
    route,
    sparse_mixer,
)
from onnx_import.ops.packing import BITS, BLOCK_SIZES, dequantise, packed_bytes, unpack
from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator, Role, WeightPlan

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": fast_gelu,
    "silu": jax.nn.silu,
    "identity": lambda x: x,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
_GATED = ("swiglu", "geglu")
_LAYERS = ("fc1", "fc2", "fc3")


def _weights_of(layer: str) -> str:
    return f"{layer}_experts_weights"


def _bias_of(layer: str) -> str:
    return f"{layer}_experts_bias"


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    x = args["input"]
    rows = x.reshape(-1, x.shape[-1])
    logits = args["router_probs"].reshape(rows.shape[0], -1)
    weights, experts = _route(call, logits, args.get("router_weights"))

    def product(layer: str, rows: jax.Array, number: jax.Array) -> jax.Array:
        return expert_matmul(rows, args[_weights_of(layer)], args[_bias_of(layer)], number)

    def expert(rows: jax.Array, number: jax.Array) -> jax.Array:
        first = product("fc1", rows, number)
        third = product("fc3", rows, number) if args[_weights_of("fc3")] is not None else None
        return product("fc2", _activate(call.attributes, first, third).astype(rows.dtype), number)

    return (mix(rows, weights, experts, logits.shape[-1], expert).reshape(x.shape),)


def _route(call: Call, logits: jax.Array, values: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if call.attributes["use_sparse_mixer"]:
        return sparse_mixer(logits)
    normalise = bool(call.attributes["normalize_routing_weights"])
    weights, experts = route(logits, call.attributes["k"], normalise=normalise)
    if values is not None:
        weights = mixing_weights(values.reshape(logits.shape), experts, normalise=normalise)
    return weights, experts


def _activate(attributes: Mapping[str, Any], first: jax.Array, third: jax.Array | None) -> jax.Array:
    """From fc1's and fc3's float32 [rows, out] to fc2's input [rows, in]."""
    kind = attributes["activation_type"]
    if kind not in _GATED:
        act = _ACTIVATIONS[kind](first)
        return act if third is None else act * third
    if attributes["swiglu_fusion"] == 1:
        gate, linear = first[:, 0::2], first[:, 1::2]
    elif attributes["swiglu_fusion"] == 2:
        gate, linear = jnp.split(first, 2, axis=-1)
    else:
        assert third is not None, "checked: unfused needs fc3"
        gate, linear = first, third
    if kind == "geglu":
        return fast_gelu(gate) * linear
    limit, alpha = attributes["swiglu_limit"], attributes["activation_alpha"]
    late = attributes["swiglu_limit_after_activation"]
    if limit is not None:
        linear = jnp.clip(linear, -limit, limit)
        gate = gate if late else jnp.minimum(gate, limit)
    act = gate * jax.nn.sigmoid(alpha * gate)
    if limit is not None and late:
        act = jnp.minimum(act, limit)
    return act * (linear + attributes["activation_beta"])


def _dense_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    names = (name for name in map(_weights_of, _LAYERS) if name in tensors)
    return {name: _dense_plan(tensors[name]) for name in names}


def _dense_plan(tensor: Tensor) -> WeightPlan:
    return WeightPlan(
        f"{tensor.key}:experts", dense_experts_struct(tensor.shape, tensor.dtype), (tensor,), dense_experts
    )


def _quantised_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    return {
        _weights_of(layer): _quantised_plan(call, tensors, layer, mode)
        for layer in _LAYERS
        if _weights_of(layer) in tensors
    }


def _quantised_plan(call: Call, tensors: Mapping[str, Tensor], layer: str, mode: str) -> WeightPlan:
    bits = _bits(call, layer)
    data, scales = tensors[_weights_of(layer)], tensors[f"{layer}_scales"]
    zeros = tensors.get(f"{layer}_zero_points")
    experts, rows, bytes_a_row = data.shape
    shape = experts, rows, bytes_a_row * 8 // bits
    block_size = call.attributes["block_size"] or shape[2]
    read = partial(_dequantise_experts, shape=shape, bits=bits, block_size=block_size)
    sources = (data, scales) if zeros is None else (data, scales, zeros)
    key = f"{'+'.join(source.key for source in sources)}:{bits}x{block_size}"
    if mode == "fast":
        struct = quantised_experts_struct(shape)
        return WeightPlan(f"{key}:int8", struct, sources, lambda *arrays: quantised_experts(read(*arrays)))
    dense = dense_experts_struct(shape, scales.dtype)
    return WeightPlan(f"{key}:experts", dense, sources, lambda *arrays: dense_experts(read(*arrays)))


def _dequantise_experts(
    data: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    *,
    shape: tuple[int, int, int],
    bits: int,
    block_size: int,
) -> np.ndarray:
    """The weights [experts, out, in] behind packed rows; one block a row has its zero points packed along `out`."""
    experts, rows, columns = shape
    if zeros is not None and zeros.ndim == 2:
        zeros = unpack(zeros, bits, rows).astype(np.float32)
    sizes = {"bits": bits, "block_size": block_size, "rows": experts * rows, "columns": columns}
    return dequantise(data, scales, zeros, **sizes).reshape(shape)


def _bits(call: Call, layer: str) -> int:
    return int(call.attributes[f"{layer}_expert_weight_bits"] or call.attributes["expert_weight_bits"])


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    label, attributes = call.node.label, call.attributes
    fusion, kind = attributes["swiglu_fusion"], attributes["activation_type"]
    fused, third = kind in _GATED and fusion != 0, _weights_of("fc3") in tensors
    if fused == third and kind in _GATED:
        yield f"{label} has activation_type={kind!r} with swiglu_fusion={fusion} and {'an' if third else 'no'} fc3"
    if kind == "geglu" and not fusion:
        yield f"{label} has activation_type='geglu' with swiglu_fusion=0, which isn't supported"
    if kind not in _GATED and fusion:
        yield f"{label} has swiglu_fusion={fusion} with activation_type={kind!r}, which isn't supported"
    unused = {
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_limit": None,
        "swiglu_limit_after_activation": 0,
    }
    if kind != "swiglu":
        for name, default in unused.items():
            if attributes[name] != default:
                yield f"{label} has {name}={attributes[name]} with activation_type={kind!r}, which isn't supported"
    if _bias_of("fc3") in tensors and not third:
        yield f"{label} has fc3_experts_bias and no fc3_experts_weights"
    if attributes["use_sparse_mixer"]:
        if attributes["k"] != 2:
            yield f"{label} has use_sparse_mixer=1 with k={attributes['k']}; only two experts are supported"
        if attributes["normalize_routing_weights"] or any(call.node.inputs[_ROUTER_WEIGHTS:]):
            yield f"{label} has use_sparse_mixer=1 with weights of its own, which isn't supported"
    yield from _check_shapes(call, tensors, 2 if fused else 1)


def _check_shapes(call: Call, tensors: Mapping[str, Tensor], fused: int) -> Iterator[str]:
    """fc2's weights give the sizes that all others have to have."""
    quantised = call.node.op_type == "QMoE"
    shape = tensors[_weights_of("fc2")].shape
    if len(shape) != 3:
        yield f"{call.node.label} needs fc2_experts_weights of rank three, but its shape is {list(shape)}"
        return
    experts, hidden, inner = shape
    inner = inner * 8 // _bits(call, "fc2") if quantised else inner
    if quantised and _packed_for_gpu(call, tensors, fused):
        yield (
            f"{call.node.label} has fc1_experts_weights of shape {list(tensors[_weights_of('fc1')].shape)}, packed for "
            f"a GPU; export it with raw weights (qmoe_weights_prepacked=0)"
        )
        return
    if not 1 <= call.attributes["k"] <= experts:
        yield f"{call.node.label} has k={call.attributes['k']} of {experts} experts"
    for layer, rows, columns in (
        ("fc1", fused * inner, hidden),
        ("fc2", hidden, inner),
        ("fc3", inner, hidden),
    ):
        if _weights_of(layer) not in tensors:
            continue
        expected: dict[str, tuple[int, ...]] = {_bias_of(layer): (experts, rows)}
        if quantised:
            if f"{layer}_scales" not in tensors:
                yield f"{call.node.label} lacks its input '{layer}_scales'"
            expected |= _quantised_shapes(call, layer, experts, rows, columns)
        else:
            expected[_weights_of(layer)] = experts, rows, columns
        for name, wanted in expected.items():
            if name in tensors and tensors[name].shape != wanted:
                found = list(tensors[name].shape)
                yield f"{call.node.label} needs {name} of shape {list(wanted)}, but its shape is {found}"


def _packed_for_gpu(call: Call, tensors: Mapping[str, Tensor], fused: int) -> bool:
    """Whether fc1 and fc2 fit together only as [experts, in, out * bits / 8]; no attribute tells."""
    first, second = (tensors[_weights_of(layer)].shape for layer in ("fc1", "fc2"))
    bits, after = _bits(call, "fc1"), _bits(call, "fc2")
    turned = second[2] * 8 // after, packed_bytes(fused * second[1], bits)
    raw = fused * (second[2] * 8 // after), packed_bytes(second[1], bits)
    return first[1:] == turned != raw


def _quantised_shapes(
    call: Call, layer: str, experts: int, rows: int, columns: int
) -> dict[str, tuple[int, ...]]:
    bits, size = _bits(call, layer), call.attributes["block_size"]
    scales: tuple[int, ...] = experts, rows
    zeros: tuple[int, ...] = experts, packed_bytes(rows, bits)
    if size:
        blocks = -(-columns // size)
        scales, zeros = (experts, rows, blocks), (experts, rows, packed_bytes(blocks, bits))
    weights = experts, rows, packed_bytes(columns, bits)
    return {_weights_of(layer): weights, f"{layer}_scales": scales, f"{layer}_zero_points": zeros}


_ATTRIBUTES = {
    "k": Attribute(1),
    "activation_type": Attribute("relu", only=(*_ACTIVATIONS, *_GATED)),
    "activation_alpha": Attribute(1.0),
    "activation_beta": Attribute(0.0),
    "swiglu_fusion": Attribute(0, only=(0, 1, 2)),
    "swiglu_limit": Attribute(None, of=float),
    "swiglu_limit_after_activation": Attribute(0, only=(0, 1)),
    "normalize_routing_weights": Attribute(0, only=(0, 1)),
    "use_sparse_mixer": Attribute(0, only=(0, 1)),
}
_QUANTISED_ATTRIBUTES = {
    **_ATTRIBUTES,
    "quant_type": Attribute("int", only=("int",)),
    "expert_weight_bits": Attribute(4, only=BITS),
    **{f"{layer}_expert_weight_bits": Attribute(None, only=BITS) for layer in _LAYERS},
    "block_size": Attribute(0, only=(0, *BLOCK_SIZES)),
    # A hint on how coarsely a runtime may quantise the activations; `weights` decides that here.
    "accuracy_level": Attribute(0),
    # -1 is written for raw weights too; those of other layouts have other shapes.
    "weights_prepacked": Attribute(-1, only=(-1, 0)),
}


def _weight_inputs(layer: str, *, optional: bool = False) -> tuple[Input, ...]:
    return (
        Input(_weights_of(layer), Role.WEIGHT, optional),
        Input(_bias_of(layer), optional=True),
    )


def _quantised_inputs(layer: str, *, optional: bool = False) -> tuple[Input, ...]:
    return (
        Input(_weights_of(layer), Role.WEIGHT, optional, _CODES),
        Input(f"{layer}_scales", Role.WEIGHT, optional),
        Input(_bias_of(layer), optional=True),
    )


_CODES = frozenset(("uint8",))
_ROUTER_WEIGHTS = 14
"""Where QMoE has that input; MoE ends before."""
_ROUTED = (Input("input"), Input("router_probs"))

OPERATORS = (
    Operator(
        "com.microsoft",
        "MoE",
        1,
        (*_ROUTED, *_weight_inputs("fc1"), *_weight_inputs("fc2"), *_weight_inputs("fc3", optional=True)),
        _ATTRIBUTES,
        _run,
        weights=_dense_weights,
        check=_check,
    ),
    Operator(
        "com.microsoft",
        "QMoE",
        1,
        (
            *_ROUTED,
            *_quantised_inputs("fc1"),
            *_quantised_inputs("fc2"),
            *_quantised_inputs("fc3", optional=True),
            *(Input(f"{layer}_zero_points", Role.WEIGHT, optional=True, dtypes=_CODES) for layer in _LAYERS),
            Input("router_weights", optional=True),
            Input("fc1_global_scale", Role.REFUSED),
            Input("fc2_global_scale", Role.REFUSED),
            Input("fc1_act_scale", Role.REFUSED),
            Input("fc2_act_scale", Role.REFUSED),
            Input("fc1_act_block_scale", Role.REFUSED),
            Input("fc2_act_block_scale", Role.REFUSED),
        ),
        _QUANTISED_ATTRIBUTES,
        _run,
        weights=_quantised_weights,
        check=_check,
    ),
)
