"""A tiny random llama as a GGUF file, and its logits in plain NumPy straight from that file's own layout."""

import math
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, CONTEXT = 64, 4, 2, 16, 96, 2, 64
ROPE_THETA, EPSILON = 1000.0, 1e-5
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2")
TOKENS = (
    *CONTROL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are tiny.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def q4_1_bytes(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random Q4_1 rows, uint8 [rows, columns / 32 * 20], weights about -0.3 to 0.3."""
    blocks = columns // 32
    deltas = random.uniform(0.01, 0.05, (rows, blocks, 1)).astype("<f2")
    minima = (-7.5 * deltas + random.uniform(-0.02, 0.02, deltas.shape)).astype("<f2")
    codes = random.integers(0, 256, (rows, blocks, 16), dtype=np.uint8)
    return np.concatenate([deltas.view(np.uint8), minima.view(np.uint8), codes], -1).reshape(rows, -1)


def q8_0_bytes(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random Q8_0 rows, uint8 [rows, columns / 32 * 34]."""
    blocks = columns // 32
    deltas = random.uniform(0.002, 0.01, (rows, blocks, 1)).astype("<f2")
    codes = random.integers(0, 256, (rows, blocks, 32), dtype=np.uint8)
    return np.concatenate([deltas.view(np.uint8), codes], -1).reshape(rows, -1)


def write_tiny_gguf(
    path: Path, layers: int = LAYERS, intermediate: int = INTERMEDIATE, pre_tokenizer: str = "smollm"
) -> Path:
    random = np.random.default_rng(7)
    matrices = {  # name -> (rows, columns)
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (intermediate, HIDDEN),
        "ffn_up": (intermediate, HIDDEN),
        "ffn_down": (HIDDEN, intermediate),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    def norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))

    embedding = q8_0_bytes(random, len(TOKENS), HIDDEN)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        for name, shape in matrices.items():
            data = q4_1_bytes(random, *shape)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    norm("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_weights(path: Path) -> dict[str, np.ndarray]:
    """Every tensor as the gguf package dequantises it, rows and columns as stored."""
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}


def numpy_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits, float64 [tokens, vocabulary], of the llama in `weights`, rotating neighbours as llama.cpp does."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:  # [tokens, heads, head_dim]
        angle = np.outer(np.arange(len(x)), ROPE_THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle))
        return np.stack(turned, -1).reshape(x.shape)

    x = w["token_embd.weight"][tokens]
    count = len(tokens)
    causal = np.triu(np.full((count, count), -np.inf), 1)
    layer = 0
    while f"blk.{layer}.attn_norm.weight" in w:
        block = f"blk.{layer}."
        h = norm(x, f"{block}attn_norm.weight")
        q = rotate((h @ w[f"{block}attn_q.weight"].T).reshape(count, HEADS, HEAD_DIM))
        k = rotate((h @ w[f"{block}attn_k.weight"].T).reshape(count, KV_HEADS, HEAD_DIM))
        v = (h @ w[f"{block}attn_v.weight"].T).reshape(count, KV_HEADS, HEAD_DIM)
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM) + causal
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(count, -1) @ w[f"{block}attn_output.weight"].T
        h = norm(x, f"{block}ffn_norm.weight")
        gate, up = h @ w[f"{block}ffn_gate.weight"].T, h @ w[f"{block}ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{block}ffn_down.weight"].T
        layer += 1
    return norm(x, "output_norm.weight") @ w["token_embd.weight"].T
