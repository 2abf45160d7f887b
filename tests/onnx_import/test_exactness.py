"""E6's half of the importer: a token's logits keep their bits whatever runs beside it."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import onnx_import
from onnx_import.ops.matmul import contract, dense_weight
from onnx_import.ops.norm import rms_norm
from onnx_import.ops.quantized import integer_matmul, quantise_rows
from tests.onnx_import.reference import model

COUNTS = (2, 4, 8, 16, 64, 256)


def own_token_attention(
    spec: onnx_import.AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
    """A stand-in that is exact by itself: element-wise on the token's own query, key and value."""
    key, value = (jnp.repeat(x, spec.num_heads // spec.num_kv_heads, axis=1) for x in (key, value))
    return (query + key) * jnp.asarray(0.5, query.dtype) - value, None


@pytest.mark.parametrize(
    ("form", "family", "weights"),
    [
        ("cpu-fp32", "llama", "exact"),
        ("cpu-fp32", "qwen3", "exact"),
        ("cpu-int4", "qwen2", "fast"),
        ("paged-fp16", "qwen3", "exact"),
    ],
)
def test_E6_logits_have_the_same_bits_in_any_company(
    form: str, family: str, weights: onnx_import.WeightMode
) -> None:
    """E6: token counts 2 to 256, other neighbours, and fewer selected rows change no bit."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(model(form, family)), weights)

    @jax.jit
    def run(params: Any, tokens: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
        return decoder.apply(params, tokens, positions, own_token_attention, rows)[0]

    random = np.random.default_rng(0)
    tokens = random.integers(0, 320, COUNTS[-1]).astype(np.int32)
    positions = random.integers(0, 512, COUNTS[-1]).astype(np.int32)
    whole = np.asarray(run(decoder.params, tokens, positions, np.arange(COUNTS[-1], dtype=np.int32)))
    for count in COUNTS:
        start = (COUNTS[-1] - count) // 2
        part = slice(start, start + count)
        for selected in {2, count} if count in (2, 16, 256) else {count}:
            rows = random.permutation(count)[:selected].astype(np.int32)
            alone = np.asarray(run(decoder.params, tokens[part], positions[part], rows))
            np.testing.assert_array_equal(
                alone, whole[start + rows], err_msg=f"{count} tokens, {selected} rows"
            )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_E6_narrow_floats_keep_a_rows_bits(dtype: type) -> None:
    """E6, S2: float16 and bfloat16 activations and weights; the sum stays in float32 until the end."""
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(shape, np.float32).astype(dtype) for shape in ((256, 100), (70, 100)))
    dense = jax.tree.map(jnp.asarray, dense_weight(weight))
    product = jax.jit(lambda x: contract(x, dense))
    whole = np.asarray(product(x))
    assert whole.dtype == dtype
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(whole.astype(np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-4)
    for count in COUNTS:
        np.testing.assert_array_equal(np.asarray(product(x[-count:])), whole[-count:])


@pytest.mark.parametrize("width", [16, 48, 64, 100, 576, 896])
def test_E6_norms_and_products_keep_a_rows_bits(width: int) -> None:
    """E6 for the three reductions, at widths where XLA's own row sums change with the row count."""
    random = np.random.default_rng(width)
    x = random.standard_normal((max(COUNTS), width), np.float32)
    weight = random.standard_normal((96, width), np.float32)  # one whole block of columns and a half
    scale = jnp.asarray(random.standard_normal(width, np.float32))
    dense = jax.tree.map(jnp.asarray, dense_weight(weight))
    integers = jax.tree.map(jnp.asarray, quantise_rows(weight))
    operations = {
        "norm": jax.jit(lambda x: rms_norm(x, scale, 1e-6)),
        "float": jax.jit(lambda x: contract(x, dense)),
        "integer": jax.jit(lambda x: integer_matmul(x, integers)),
    }
    for name, operation in operations.items():
        whole = np.asarray(operation(x))
        for count in COUNTS:
            np.testing.assert_array_equal(np.asarray(operation(x[-count:])), whole[-count:], err_msg=name)
