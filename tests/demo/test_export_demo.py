"""The benchmark's exporter: the Hugging Face weights that it hands to the builder are those of the GGUF file."""

import json
import sys

import numpy as np

from benchmarks import export_demo
from jaxengine.demo.gguf_reader import read_gguf
from tests.demo import synthetic as tiny


def hf_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The NumPy llama on Hugging Face weights: their q and k rows put back in llama.cpp's order, names mapped."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(tiny.LAYERS):
        names |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}" for theirs, ours in parts.items()}
    renamed = {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in weights.items()}
    for name, value in renamed.items():
        if "attn_q" in name or "attn_k" in name:
            heads = value.reshape(-1, 2, tiny.HEAD_DIM // 2, tiny.HIDDEN)
            renamed[name] = heads.swapaxes(1, 2).reshape(value.shape)
    return tiny.numpy_logits(renamed, tokens)


def test_the_weights_give_the_same_logits(tiny_gguf):
    made = export_demo.hf_weights(read_gguf(tiny_gguf))
    tokens = [1, 9, 77, 30]
    expected = tiny.numpy_logits(tiny.gguf_weights(tiny_gguf), tokens)
    np.testing.assert_array_equal(hf_logits(made, tokens), expected)


def test_the_config_is_json_and_matches_the_weights(tiny_gguf):
    model = read_gguf(tiny_gguf)
    config = json.loads(json.dumps(export_demo.hf_config(model)))
    weights = export_demo.hf_weights(model)
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape[0] == (
        config["num_key_value_heads"] * config["head_dim"]
    )
    assert config["eos_token_id"] == [2, 0]


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_demo, "NEEDS", ("numpy", "no_such_builder"))
    monkeypatch.setattr(sys, "argv", ["export_demo.py", "--out", str(tmp_path / "out")])
    assert export_demo.main() == 1
    assert capsys.readouterr().err == "error: the model builder needs no_such_builder: install it with pip.\n"
    assert not (tmp_path / "out").exists()
