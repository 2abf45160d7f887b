"""The real demo model: ONNX Runtime GenAI answers with it as expected."""

import json
from pathlib import Path

import jinja2
import onnxruntime_genai
import pytest
from tokenizers import Tokenizer

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.mark.demo
def test_onnx_runtime_genai_names_paris(demo_folder: Path):
    config = json.loads((demo_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Template(config["chat_template"], keep_trailing_newline=True)
    prompt = template.render(messages=[{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    assert SYSTEM in prompt

    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    model = onnxruntime_genai.Model(str(demo_folder))
    assert [int(i) for i in onnxruntime_genai.Tokenizer(model).encode(prompt)] == ids

    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + 20)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    answer = [int(i) for i in generator.get_sequence(0)][len(ids) :]
    assert tokenizer.decode(answer) == ANSWER
    assert len(answer) < 20  # ended by its end token, which the sequence leaves out
