"""`jaxengine verify`: the engine's logits beside those of ONNX Runtime on the same file, position by position.

The engine takes the prompt one token a step, so that every position's logits pass through its whole path: packed
inputs, the paged cache, the state of each layer. ONNX Runtime takes it at once, from empty state.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

import onnx_import
from jaxengine.cli.errors import USAGE, CommandError
from jaxengine.cli.options import add_weights_option, positive
from jaxengine.cli.output import write_text
from jaxengine.cli.reference import reference_logits, require_runtime
from jaxengine.cli.session import BLOCK_SIZE, load_folder
from jaxengine.config import EngineConfig, RequestOptions, TurnOptions
from jaxengine.errors import StepError
from jaxengine.model import Model
from jaxengine.planning import plan_step
from jaxengine.requests import begin_turn, create_request
from jaxengine.state import init_state
from jaxengine.text import Tokenizer
from jaxengine.transaction import commit, execute

USUAL_TOKENS = 32
TOLERANCES = {"exact": 1e-3, "half": 2e-2, "fast": 0.15}
"""Of the largest logit: float32 mathematics, float16 on one side or both, and weights requantised to int8.

Half precision and int8 are looser than mostly needed: a row of weights that is short averages little out.
"""


@dataclass(frozen=True)
class Comparison:
    """How far two float[positions, vocab] logits are apart.

    `absolute` is the largest difference, at `position`; `relative` that over the reference's largest logit. `flip`
    is the first position whose likeliest token differs, with ours and the reference's, None if there is none.
    """

    absolute: float
    relative: float
    position: int
    flip: tuple[int, int, int] | None


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="compare a model folder's logits with ONNX Runtime's",
        description="Run a prompt through the engine and, from the same ONNX file, through ONNX Runtime, and print how "
        "far the logits are apart. The exit status is 0 if that is within the tolerance. MatMulNBits is asked to "
        "multiply in float32 there, since by itself it rounds activations to int8. Needs the package onnxruntime.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the model folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="a prompt, taken as it is")
    prompt.add_argument(
        "--tokens",
        type=positive,
        default=USUAL_TOKENS,
        metavar="N",
        help="a prompt of N random tokens, the same each time (default: %(default)s)",
    )
    add_weights_option(parser)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="take ONNX Runtime's logits from this folder, a two-dimensional export of the same model: ONNX Runtime "
        "runs no packed export (PagedAttention) on a CPU",
    )
    parser.add_argument(
        "--tolerance",
        type=_fraction,
        metavar="X",
        help="largest difference that passes, as a share of the largest logit (default: "
        f"{TOLERANCES['exact']:g}; with float16 {TOLERANCES['half']:g}; with --weights fast {TOLERANCES['fast']:g})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if arguments.prompt == "":
        raise CommandError("the prompt is empty; give at least one character")
    runtime = require_runtime()
    reference = onnx_import.read_folder(arguments.against or arguments.folder)
    if len(reference.graph.inputs.get(reference.manifest.input_ids, (None, ()))[1]) == 1:
        raise CommandError(
            f"{reference.path} holds a packed export, which ONNX Runtime doesn't run here; give --against FOLDER with "
            "a two-dimensional export of the same model",
            USAGE,
        )
    # What the folder says about searching doesn't touch logits, and may be more than the engine can do.
    model = load_folder(arguments.folder, arguments.weights, {"search": None})
    ids = _prompt_ids(arguments, model)
    with Console(stderr=True).status(f"Running {len(ids)} tokens"):
        ours = engine_logits(model, ids)
        theirs = reference_logits(reference, model, ids, runtime)
    if ours.shape != theirs.shape:
        raise CommandError(
            f"the logits of {arguments.folder} are {ours.shape[1]} wide and those of {reference.path} "
            f"{theirs.shape[1]}; give --against an export of the same model"
        )
    found = compare(ours, theirs)
    tolerance = arguments.tolerance
    if tolerance is None:
        tolerance = TOLERANCES[_precision(arguments.weights, model, reference)]
    write_text(_described(found, ours.shape, reference, tolerance))
    if not found.relative <= tolerance:
        raise CommandError(
            f"the logits differ by {found.relative:.2g} of the largest one, above the tolerance of {tolerance:g}"
        )
    return 0


def engine_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    """The engine's float32[positions, vocab], a step a token; raises CommandError for a prompt that it refuses."""
    tokens = len(ids) + 1  # the engine takes no prompt without room for an answer
    if tokens > model.config.context_length:
        raise CommandError(
            f"the prompt has {len(ids)} tokens; give at most {model.config.context_length - 1}, one less than the "
            "model's context"
        )
    config = EngineConfig(
        max_batch_size=1, chunk_size=1, num_blocks=-(-tokens // BLOCK_SIZE), block_size=BLOCK_SIZE
    )
    try:
        # A limit of its own length: some graphs choose by it how they rotate, as ONNX Runtime does by the prompt's.
        options = RequestOptions(max_session_tokens=tokens)
        state, request_id = create_request(init_state(model, config), options)
        state, _ = begin_turn(state, request_id, ids.tolist(), TurnOptions())
    except ValueError as error:
        raise CommandError(f"the engine refuses the prompt: {error}") from error
    rows = []
    for position in range(len(ids)):
        try:
            transaction = execute(model, state, plan_step(state))
        except StepError as error:
            raise CommandError(f"the step at position {position} failed: {error}") from error
        rows.append(np.asarray(transaction.logits[0]))
        state, _ = commit(state, transaction)
    return np.stack(rows)


def compare(ours: np.ndarray, theirs: np.ndarray) -> Comparison:
    """Compares float[positions, vocab] with a reference; a NaN on either side is an infinite difference."""
    difference = np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max(axis=1)
    position = int(difference.argmax())
    scale = float(np.abs(theirs).max())
    mine, other = ours.argmax(axis=1), theirs.argmax(axis=1)
    flips = np.flatnonzero(mine != other)
    absolute = float(difference[position])
    return Comparison(
        absolute=absolute,
        relative=absolute / scale if scale > 0 else absolute,
        position=position,
        flip=(int(flips[0]), int(mine[flips[0]]), int(other[flips[0]])) if len(flips) else None,
    )


def _prompt_ids(arguments: argparse.Namespace, model: Model) -> np.ndarray:
    if arguments.prompt is None:
        return np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.tokens)
    tokenizer = Tokenizer.from_folder(arguments.folder)
    tokenizer.require_fits(model.decoder.vocab_size)
    return np.array(tokenizer.encode(arguments.prompt), np.int64)


def _precision(weights: str, model: Model, reference: onnx_import.ModelFolder) -> str:
    if weights == "fast":
        return "fast"
    groups = reference.manifest.state_groups
    types = {spec.kv_dtype.name for spec in model.decoder.layers} | {str(group.dtype) for group in groups}
    return "exact" if types == {"float32"} else "half"


def _described(
    found: Comparison, shape: tuple[int, ...], reference: onnx_import.ModelFolder, tolerance: float
) -> str:
    lines = {
        "reference": f"ONNX Runtime on {reference.graph.file}",
        "compared": f"{shape[0]} positions of {shape[1]} logits",
        "largest difference": f"{found.absolute:.3g}, at position {found.position}",
        "of the largest logit": f"{found.relative:.3g}, tolerance {tolerance:g}",
        "greedy tokens": "all the same"
        if found.flip is None
        else "first differ at position {}: {} here, {} in the reference".format(*found.flip),
    }
    width = max(map(len, lines)) + 2
    return "".join(f"{name:<{width}}{text}\n" for name, text in lines.items())


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value
