"""`genai_config.json` of a converted llama model, as ONNX Runtime GenAI reads it."""

from typing import Any

from jaxengine.demo.gguf_reader import GgufModel
from jaxengine.demo.onnx_writer import MODEL_FILE


def genai_config(model: GgufModel) -> dict[str, Any]:
    """The file's content: geometry, names of the graph's inputs and outputs, end tokens, greedy search."""
    shape, tokenizer = model.shape, model.tokenizer
    first_end = tokenizer.eos_id
    return {
        "model": {
            "bos_token_id": first_end if tokenizer.bos_id is None else tokenizer.bos_id,
            "context_length": shape.context_length,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL_FILE,
                "head_size": shape.head_dim,
                "hidden_size": shape.hidden,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": shape.heads,
                "num_hidden_layers": shape.layers,
                "num_key_value_heads": shape.kv_heads,
            },
            "eos_token_id": list(tokenizer.end_ids),
            "pad_token_id": first_end if tokenizer.pad_id is None else tokenizer.pad_id,
            "type": "llama",
            "vocab_size": shape.vocab_size,
        },
        "search": {
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": shape.context_length,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
        },
    }
