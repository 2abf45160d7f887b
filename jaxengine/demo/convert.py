"""A GGUF file turned into a model folder: graph, weights, configuration, tokenizer."""

import json
from pathlib import Path

from jaxengine.demo.genai_config import genai_config
from jaxengine.demo.gguf_reader import read_gguf
from jaxengine.demo.onnx_writer import write_onnx
from jaxengine.demo.progress import Report
from jaxengine.demo.tokenizer import write_tokenizer


def convert(gguf: Path, folder: Path, report: Report) -> None:
    """Write the llama model in `gguf` into `folder`, which must exist.

    Weights are lossless: `block_quantised` says to which last bit. The GGUF file must store matrices as Q4_1 and the
    embedding, which is also the head, as Q8_0.

    Raises:
        DemoModelError: the file isn't such a model.
        OSError: the folder can't be written.
    """
    model = read_gguf(gguf)
    write_onnx(model, folder, report)
    write_tokenizer(model.tokenizer, model.shape.context_length, folder)
    config = json.dumps(genai_config(model), indent=4)
    (folder / "genai_config.json").write_text(config, encoding="utf-8")
