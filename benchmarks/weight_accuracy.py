"""What does each way of holding int4 weights cost in accuracy?

    python -m benchmarks.weight_accuracy --int4 FOLDER [--fp32 FOLDER] [--json FILE]

Logits at every position of a text in this folder, read in windows: mean and largest absolute difference and changed
arg-maxes against a float reference of *the same* weights, and perplexity, which is comparable between all rows.

The reference of the int4 folder is ONNX Runtime on a copy whose `accuracy_level` is 1, so that it multiplies in
float32; as exported, level 4, it rounds activations to int8. The reference of the fp32 folder is ONNX Runtime on it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import onnx_import
from benchmarks import report
from benchmarks.turns import BenchmarkError

TEXT = Path(__file__).parent / "data" / "prose.txt"

Logits = Callable[[np.ndarray], np.ndarray]
"""Token ids int32 [window] to logits float32 [window, vocab]; the window starts a sequence."""


def causal_attention(
    spec: onnx_import.AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
    """Attention of one sequence over itself, in float32: the weights are on trial here, not the cache."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query.astype(jnp.float32), keys) * spec.scale
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), values).astype(query.dtype), None


def jaxengine_logits(folder: Path, weights: Literal["exact", "fast"], window: int) -> Logits:
    """Logits of a folder's decoder with its weights held in one of the two ways."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(folder), weights=weights)
    positions = jnp.arange(window, dtype=jnp.int32)
    forward = jax.jit(
        lambda params, ids: decoder.apply(params, ids, positions, causal_attention, positions)[0]
    )

    def logits(ids: np.ndarray) -> np.ndarray:
        padded = np.zeros(window, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(forward(decoder.params, padded))[: len(ids)]

    return logits


def runtime_logits(folder: Path, accuracy_level: int | None = None) -> Logits:
    """ONNX Runtime's logits of a folder in the two-dimensional form.

    Args:
        folder: The model folder.
        accuracy_level: What to set on every MatMulNBits; None leaves the file as it is.
    """
    import onnx
    import onnxruntime

    decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    proto = onnx.load(folder / decoder["filename"], load_external_data=False)
    for node in proto.graph.node if accuracy_level is not None else ():
        if node.op_type == "MatMulNBits":
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("accuracy_level", accuracy_level)])
    kv_heads = {
        value.name: value.type.tensor_type.shape.dim[1].dim_value
        for value in proto.graph.input
        if value.name.startswith("past_key_values")
    }
    empty = {
        name: np.zeros((1, heads, 0, decoder["head_size"]), np.float32) for name, heads in kv_heads.items()
    }
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    model, providers = proto.SerializeToString(), ["CPUExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise BenchmarkError(f"ONNX Runtime can't load {folder / decoder['filename']}: {reason}") from error

    def logits(ids: np.ndarray) -> np.ndarray:
        feed = {"input_ids": ids[None].astype(np.int64), "attention_mask": np.ones((1, len(ids)), np.int64)}
        return session.run(["logits"], feed | empty)[0][0]

    return logits


def negative_log_likelihood(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """float64[window - 1], of each token but the first given those before it."""
    best = logits.max(axis=-1)
    total = np.log(np.exp(logits - best[:, None]).sum(axis=-1, dtype=np.float64)) + best
    return total[:-1] - np.take_along_axis(logits[:-1], ids[1:, None], axis=-1)[:, 0]


def compare(
    name: str, logits: Logits, reference: list[np.ndarray] | None, windows: list[np.ndarray]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """One row of the result, and the logits; without a reference only the perplexity is filled in."""
    found = [logits(ids) for ids in windows]
    losses = np.concatenate([negative_log_likelihood(*pair) for pair in zip(found, windows, strict=True)])
    row: dict[str, Any] = {
        "held": name,
        "perplexity": float(np.exp(losses.mean())),
        "mean_error": None,
        "max_error": None,
        "flips": None,
        "positions": sum(map(len, windows)),
    }
    if reference is not None:
        errors = [np.abs(mine - theirs) for mine, theirs in zip(found, reference, strict=True)]
        row["mean_error"] = float(np.mean([error.mean() for error in errors], dtype=np.float64))
        row["max_error"] = float(max(error.max() for error in errors))
        row["flips"] = int(
            sum(
                (mine.argmax(-1) != theirs.argmax(-1)).sum()
                for mine, theirs in zip(found, reference, strict=True)
            )
        )
    return row, found


def compare_folder(
    folder: Path, forms: Sequence[str], size: int, window: int, level: int | None
) -> list[dict[str, Any]]:
    """Rows of one folder, the reference first; models are loaded one at a time."""
    windows = text_windows(folder, size, window)
    label = "" if level is None else f", accuracy level {level}"
    row, reference = compare(f"ONNX Runtime{label}", runtime_logits(folder, level), None, windows)
    rows = [row]
    makers: list[tuple[str, Callable[[], Logits]]] = []
    if level is not None:
        makers.append(("ONNX Runtime as exported", lambda: runtime_logits(folder)))
    if "exact" in forms:
        makers.append(("jaxengine exact", lambda: jaxengine_logits(folder, "exact", window)))
    if "fast" in forms:
        makers.append(("jaxengine fast", lambda: jaxengine_logits(folder, "fast", window)))
    for name, make in makers:
        rows.append(compare(name, make(), reference, windows)[0])
        gc.collect()
    return [{"folder": folder.name, **row} for row in rows]


def text_windows(folder: Path, size: int, window: int) -> list[np.ndarray]:
    """The first `size` tokens of the text, cut into windows of int32[at most `window`]."""
    from jaxengine.text import Tokenizer

    ids = np.array(
        Tokenizer.from_folder(folder).encode(TEXT.read_text(), add_special_tokens=False)[:size], np.int32
    )
    cut = [ids[start : start + window] for start in range(0, len(ids), window)]
    return [piece for piece in cut if len(piece) > 1]


def measure(arguments: argparse.Namespace) -> None:
    report.require_packages("onnxruntime")
    rows: list[dict[str, Any]] = []
    if arguments.fp32 is not None:
        rows += compare_folder(arguments.fp32, ("exact",), arguments.tokens, arguments.window, None)
    rows += compare_folder(arguments.int4, ("exact", "fast"), arguments.tokens, arguments.window, 1)
    record = {
        "benchmark": "weight_accuracy",
        "machine": report.machine_facts(),
        "settings": {"tokens": arguments.tokens, "window": arguments.window},
        "rows": rows,
    }
    header = ("weights", "mean error", "largest", "flips", "perplexity")
    cells = [
        (
            f"{row['folder']}: {row['held']}",
            *(
                ("reference", "", "")
                if row["mean_error"] is None
                else (
                    f"{row['mean_error']:.5f}",
                    f"{row['max_error']:.4f}",
                    f"{row['flips']} of {row['positions']}",
                )
            ),
            f"{row['perplexity']:.3f}",
        )
        for row in rows
    ]
    title = f"logits at {rows[-1]['positions']} positions in windows of {arguments.window} tokens"
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="weight_accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--int4", type=report.existing_folder, required=True, metavar="FOLDER")
    parser.add_argument(
        "--fp32", type=report.existing_folder, metavar="FOLDER", help="the same model in float32"
    )
    parser.add_argument(
        "--tokens", type=report.at_least(2), default=1500, metavar="N", help="how much of the text"
    )
    parser.add_argument(
        "--window", type=report.at_least(2), default=256, metavar="N", help="tokens of one sequence"
    )
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
