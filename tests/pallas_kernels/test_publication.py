"""Publication against a loop in NumPy: what is written, what stays, what is refused; the kernel interpreted.

The interpreter takes grid points one after the other, so it sees no race between them, and knows neither layouts nor
tiles of shared memory: it shows indexing, and barriers within a block. Compiling for Hopper is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels import backends, publish_kv, publish_kv_quantised
from pallas_kernels.mosaic import publication as mosaic
from pallas_kernels.quantisation import LARGEST_CODE

DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
QUANTISED = (
    ("int8", "bfloat16"),
    ("int8", "float32"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float16"),
)
seeds = st.integers(0, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Shape of a layer's pages."""

    num_blocks: int
    heads: int
    block_size: int
    head_dim: int

    @property
    def scales(self) -> tuple[int, ...]:
        return (self.num_blocks, 2, self.heads, self.block_size)

    @property
    def pages(self) -> tuple[int, ...]:
        return (*self.scales, self.head_dim)


layers = st.builds(
    Layer,
    num_blocks=st.integers(1, 6),
    heads=st.sampled_from((1, 2, 3, 8)),
    block_size=st.sampled_from((1, 3, 7, 16)),
    head_dim=st.sampled_from((64, 80, 96, 128, 256)),
)


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits at all, NaN and infinities of every payload among them."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def destinations(rng: np.random.Generator, tokens: int, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Different slots for a random part of the tokens, places outside for the others."""
    slots = layer.num_blocks * layer.block_size
    kept = min(tokens, slots, int(rng.integers(0, tokens + 1)))
    block = rng.choice((-1, -layer.num_blocks, layer.num_blocks, -(2**31), 2**31 - 1), tokens)
    slot = rng.integers(0, layer.block_size, tokens)
    # Some of the dropped ones are outside by their slot.
    by_slot = rng.random(tokens) < 0.3
    block[by_slot], slot[by_slot] = 0, rng.choice((-1, layer.block_size, 2**31 - 1), by_slot.sum())
    chosen = rng.permutation(tokens)[:kept]
    block[chosen], slot[chosen] = np.divmod(rng.permutation(slots)[:kept], layer.block_size)
    return block.astype(np.int32), slot.astype(np.int32)


def written(pages: np.ndarray, fresh: np.ndarray, block: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """A copy of pages with fresh[t] in its slot; the oracle."""
    after = pages.copy()
    for token, (b, s) in enumerate(zip(block, slot, strict=True)):
        if 0 <= b < pages.shape[0] and 0 <= s < pages.shape[3]:
            for kind in (0, 1):
                for head in range(pages.shape[2]):
                    after[b, kind, head, s] = fresh[token, kind, head]
    return after


def agrees(rng: np.random.Generator, shapes: list[Layer], tokens: int, dtype: str, backend: str) -> None:
    """Layers may differ in heads and head size, and every second one has its blocks in opposite order."""
    first = shapes[0]
    shapes = [
        dataclasses.replace(layer, block_size=first.block_size, num_blocks=first.num_blocks)
        for layer in shapes
    ]
    block, slot = destinations(rng, tokens, first)
    mirrored = np.clip(first.num_blocks - 1 - block.astype(np.int64), -(2**31), 2**31 - 1).astype(np.int32)
    blocks = [mirrored if i % 2 else block for i in range(len(shapes))]
    pages = [noise(rng, layer.pages, dtype) for layer in shapes]
    staged = [noise(rng, (tokens, 2, layer.heads, layer.head_dim), dtype) for layer in shapes]
    after = publish_kv(
        *([jnp.asarray(x) for x in part] for part in (pages, staged, blocks)),
        jnp.asarray(slot),
        backend=backend,
    )
    for held, fresh, to, got in zip(pages, staged, blocks, after, strict=True):
        np.testing.assert_array_equal(bits(got), bits(written(held, fresh, to, slot)))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5)
@given(seed=seeds, shapes=st.lists(layers, min_size=1, max_size=3), tokens=st.integers(0, 40))
def test_R3_R4_xla_form_writes_the_staged_rows_and_no_other_bit(dtype, seed, shapes, tokens):
    agrees(np.random.default_rng(seed), shapes, tokens, dtype, "xla")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=3)
@given(seed=seeds, shapes=st.lists(layers, min_size=1, max_size=2), tokens=st.integers(1, 40))
def test_R3_R4_C22_kernel_writes_the_staged_rows_and_no_other_bit(dtype, seed, shapes, tokens):
    agrees(np.random.default_rng(seed), shapes, tokens, dtype, "interpret")
    assert not get_races().races_found


def quantised_case(rng: np.random.Generator, layer: Layer, tokens: int, code: str, dtype: str, special: bool):
    """Pages, scales, staged rows and destinations; rows of many magnitudes, of zeros and of one element."""
    staged = rng.standard_normal((tokens, 2, layer.heads, layer.head_dim))
    staged *= 10.0 ** rng.integers(-3, 4, (*staged.shape[:-1], 1))
    staged[rng.random(staged.shape[:-1]) < 0.1] = 0.0
    staged[rng.random(staged.shape[:-1]) < 0.1, 1:] = 0.0
    staged = staged.astype(dtype)
    if special:
        odd = rng.random(staged.shape[:-1]) < 0.3
        staged[odd, 0] = rng.choice((np.nan, np.inf, -np.inf), odd.sum()).astype(dtype)
    pages, scales = noise(rng, layer.pages, code), noise(rng, layer.scales, "float32")
    return pages, scales, staged, *destinations(rng, tokens, layer)


def read_back(codes: np.ndarray, scales: np.ndarray, block: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """float64[tokens, 2, heads, head_dim]."""
    codes = codes.astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return codes[block, :, :, slot] * scales.astype(np.float64)[block, :, :, slot][..., None]


def quantises(
    rng: np.random.Generator, layer: Layer, tokens: int, code: str, dtype: str, backend: str
) -> None:
    pages, scales, staged, block, slot = quantised_case(rng, layer, tokens, code, dtype, special=True)
    [after], [after_scales] = publish_kv_quantised(
        *([jnp.asarray(x)] for x in (pages, scales, staged)),
        *map(jnp.asarray, (block, slot)),
        backend=backend,
    )
    after, after_scales = np.asarray(after), np.asarray(after_scales)
    assert after.dtype == pages.dtype
    kept = (block >= 0) & (block < layer.num_blocks) & (slot >= 0) & (slot < layer.block_size)
    block, slot = block[kept], slot[kept]
    untouched = np.ones((layer.num_blocks, layer.block_size), bool)
    untouched[block, slot] = False
    untouched = np.broadcast_to(untouched[:, None, None, :], layer.scales)
    np.testing.assert_array_equal(bits(after)[untouched], bits(pages)[untouched])
    np.testing.assert_array_equal(bits(after_scales)[untouched], bits(scales)[untouched])

    exact = staged[kept].astype(np.float64)
    got = read_back(after, after_scales, block, slot)
    finite = np.isfinite(exact).all(axis=-1)
    assert np.isnan(got[~finite]).all()
    exact, got = exact[finite], got[finite]
    # In units of 2^-24: the inverse is off by 2 (1 if exactly rounded), the product by 1, of a quotient of at most c.
    rounding = 2.0**-22
    largest = LARGEST_CODE[np.dtype(code)]
    magnitude = np.abs(exact).max(axis=-1, initial=0.0)
    scale = after_scales[block, :, :, slot].astype(np.float64)[finite]
    # Its factor 1 / c and its product are rounded once each.
    np.testing.assert_allclose(scale, np.maximum(magnitude / largest, 2.0**-126), rtol=2.0**-22)
    scale = scale[:, None]
    if code == "int8":
        # Half a step of the codes.
        most = scale * (0.5 + largest * rounding)
    else:
        # Half a step of 3 stored bits: 2^-4 of a normal code, 2^-10 absolute below 2^-6.
        most = np.maximum(np.abs(exact) * 2.0**-4, scale * 2.0**-10) + np.abs(exact) * 2 * rounding
    assert (np.abs(got - exact) <= most).all()


@pytest.mark.parametrize(("code", "dtype"), QUANTISED)
@settings(max_examples=4)
@given(seed=seeds, layer=layers, tokens=st.integers(1, 40))
def test_R3_C25_quantised_rows_read_back_within_half_a_step(code, dtype, seed, layer, tokens):
    quantises(np.random.default_rng(seed), layer, tokens, code, dtype, "xla")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "dtype"), QUANTISED[1:])
@settings(max_examples=3)
@given(seed=seeds, layer=layers, tokens=st.integers(1, 40))
def test_R3_R4_kernel_quantises_within_half_a_step(code, dtype, seed, layer, tokens):
    quantises(np.random.default_rng(seed), layer, tokens, code, dtype, "interpret")
    assert not get_races().races_found


def test_R3_kernel_publishes_more_layers_than_a_launch_takes():
    rng = np.random.default_rng(0)
    layer = Layer(num_blocks=3, heads=1, block_size=4, head_dim=64)
    count = mosaic.LAYERS_PER_LAUNCH + 2
    block, slot = destinations(rng, 2, layer)
    pages = [noise(rng, layer.pages, "int8") for _ in range(count)]
    staged = [noise(rng, (2, 2, 1, 64), "int8") for _ in range(count)]
    after = publish_kv(
        list(map(jnp.asarray, pages)),
        list(map(jnp.asarray, staged)),
        jnp.asarray(block),
        jnp.asarray(slot),
        backend="interpret",
    )
    for held, fresh, got in zip(pages, staged, after, strict=True):
        np.testing.assert_array_equal(np.asarray(got), written(held, fresh, block, slot))


def shaped(layer: Layer, tokens: int, dtype: str, code: str | None = None):
    """Pages, scales, staged rows, blocks and slots, without their elements."""
    return (
        [jax.ShapeDtypeStruct(layer.pages, code or dtype)],
        [jax.ShapeDtypeStruct(layer.scales, "float32")],
        [jax.ShapeDtypeStruct((tokens, 2, layer.heads, layer.head_dim), dtype)],
        jax.ShapeDtypeStruct((tokens,), "int32"),
        jax.ShapeDtypeStruct((tokens,), "int32"),
    )


REFUSED = {
    "head_dim 20 is not": (Layer(4, 2, 4, 20), "bfloat16"),
    "head_dim 264 is over": (Layer(4, 2, 4, 264), "bfloat16"),
    "129 KV heads are over": (Layer(4, 129, 4, 64), "int8"),
    "do not fit into shared memory": (Layer(4, 128, 4, 256), "float32"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_R5_C22_kernel_refuses_a_shape_by_name_and_the_default_warns_once(reason, monkeypatch):
    layer, dtype = REFUSED[reason]
    pages, _, staged, block, slot = shaped(layer, 3, dtype)
    for backend in ("mosaic_gpu", "interpret"):
        with pytest.raises(ValueError, match=f"{reason}.*give backend='xla'"):
            jax.eval_shape(functools.partial(publish_kv, backend=backend), pages, staged, block, slot)
    monkeypatch.setattr(backends, "compute_capability", lambda: "9.0")
    backends.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"publication kernel is not used, .*{reason}"):
        jax.make_jaxpr(publish_kv)(pages, staged, block, slot)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpr = jax.make_jaxpr(publish_kv)(pages, staged, block, slot)
    assert "scatter" in str(jaxpr)


def test_R5_default_is_xla_on_a_cpu_and_the_kernel_on_a_gpu(monkeypatch):
    pages, scales, staged, block, slot = shaped(Layer(4, 2, 4, 64), 3, "bfloat16", "int8")
    publish = jax.make_jaxpr(lambda *args: publish_kv_quantised(*args))
    assert "scatter" in str(publish(pages, scales, staged, block, slot))
    monkeypatch.setattr(backends, "compute_capability", lambda: "9.0")
    on_gpu = str(
        jax.make_jaxpr(lambda *args: publish_kv_quantised(*args))(pages, scales, staged, block, slot)
    )
    assert "mpmd_map" in on_gpu
    assert "scatter" not in on_gpu


def test_C24_kernel_takes_pages_but_no_scales_of_over_2_31_elements():
    large = Layer(num_blocks=2**19, heads=16, block_size=16, head_dim=128)
    pages, scales, staged, block, slot = shaped(large, 3, "bfloat16", "int8")
    assert np.prod(large.pages) > 2**31 > np.prod(large.scales)
    jax.eval_shape(
        functools.partial(publish_kv_quantised, backend="mosaic_gpu"), pages, scales, staged, block, slot
    )
    pages, scales, *rest = shaped(dataclasses.replace(large, num_blocks=2**22), 3, "bfloat16", "int8")
    with pytest.raises(ValueError, match="2147483648 scales a layer are over"):
        jax.eval_shape(functools.partial(publish_kv_quantised, backend="mosaic_gpu"), pages, scales, *rest)


def test_R3_donated_pages_are_not_copied():
    pages, scales, staged, block, slot = shaped(Layer(64, 2, 16, 64), 4, "bfloat16", "int8")
    compiled = (
        jax.jit(functools.partial(publish_kv_quantised, backend="xla"), donate_argnums=(0, 1))
        .lower(pages, scales, staged, block, slot)
        .compile()
    )
    pool = sum(np.prod(x[0].shape) * x[0].dtype.itemsize for x in (pages, scales))
    assert compiled.memory_analysis().alias_size_in_bytes == pool


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"staged": []}, "1 layers of pages, 0 staged"),
        ({"scales": []}, "0 layers of scales"),
        ({"staged": [jnp.zeros((3, 2, 1, 64))]}, "layer 0 has pages"),
        ({"block": jnp.zeros(4, jnp.int32)}, "layer 0 has pages"),
        ({"pages": [jnp.zeros((4, 2, 2, 4, 64), jnp.int16)]}, "pages of int16"),
        ({"scales": [jnp.zeros((4, 2, 2, 4), jnp.bfloat16)]}, "scales bfloat16"),
        ({"backend": "triton"}, "no backend 'triton'"),
    ],
)
def test_R3_arguments_that_disagree_are_named(change, culprit):
    fitting = {
        "pages": [jnp.zeros((4, 2, 2, 4, 64), jnp.int8)],
        "scales": [jnp.zeros((4, 2, 2, 4))],
        "staged": [jnp.zeros((3, 2, 2, 64))],
        "block": jnp.zeros(3, jnp.int32),
        "slot": jnp.zeros(3, jnp.int32),
    }
    with pytest.raises(ValueError, match=culprit):
        publish_kv_quantised(**fitting | change)
    if "staged" not in change:
        with pytest.raises(ValueError, match="stages float32 for pages of int8; cast it"):
            publish_kv(*(fitting[name] for name in ("pages", "staged", "block", "slot")))
