"""A decoder as a pure function: parameters and tokens in, logits and staged keys and values out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from onnx_import.dry_run import dry_run
from onnx_import.errors import UnsupportedGraph
from onnx_import.loading import load_params
from onnx_import.model_folder import ModelFolder
from onnx_import.plan import Plan, make_plan, survey
from onnx_import.protocols import Attention, AttentionSpec, FixedSpec, FixedState
from onnx_import.registry import Environment
from onnx_import.running import run_plan
from onnx_import.weights import WeightFiles, model_identity

WeightMode = Literal["exact", "fast"]


@dataclass(frozen=True)
class Decoder:
    """An imported model. `params` is a pytree of weights to pass to `apply`; nothing else is held on a device.

    `layers` are the attention layers in layer order, `fixed` the states of fixed size, `vocab_size` the width of the
    logits, `identity` a short hash that recognises the model and the way its weights are held.
    """

    layers: tuple[AttentionSpec, ...]
    fixed: tuple[FixedSpec, ...]
    vocab_size: int
    params: dict[str, Any]
    identity: str
    plan: Plan

    def apply(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        logits_rows: jax.Array,
        fixed: FixedState | None = None,
        limits: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run tokens int32 [T] at positions int32 [T], all packed in one row; pure, to be traced under jit.

        `fixed` may be left out where the decoder has no fixed state. `limits` int32 [T], which may be left out where it
        has one rotary table, says how many tokens each token's sequence may come to hold, the same at each of its
        tokens; a table for short or for long sequences is chosen by it.

        Returns float32 logits [R, vocab] of the tokens named by logits_rows int32 [R], and what the callables handed
        back: an entry a layer, then one a fixed state. A token's logits have the same bits whatever T, R and the other
        tokens are, for T and R of at least 2 and callables of which that is true. Token ids past the embedding,
        positions past the rotary cache and rows past T give NaN.
        """
        env = Environment(positions, attention, fixed, limits)
        logits = run_plan(self.plan, params, tokens, env, logits_rows)
        by_layer = [env.staged[spec.layer] for spec in self.layers]
        return logits, (*by_layer, *(env.staged_fixed[spec.name] for spec in self.fixed))


def import_decoder(folder: ModelFolder, weights: WeightMode = "exact") -> Decoder:
    """Turn a folder's graph into a decoder and load its weights.

    `weights` says how int4 and int8 weights are held: "exact" dequantises each block to float32, "fast"
    requantises to int8 with a scale an output row and multiplies by integers. Float weights are the same in both.

    Raises UnsupportedGraph, before any weight is read, listing everything that isn't supported; WeightError
    when a tensor's data isn't there.
    """
    if weights not in ("exact", "fast"):
        raise ValueError(f"weights={weights!r} isn't a way to hold weights; use 'exact' or 'fast'.")
    surveyed = survey(folder.graph, folder.manifest)
    if surveyed.problems:
        raise UnsupportedGraph(str(folder.graph.file), surveyed.problems)
    plan = make_plan(folder.graph, folder.manifest, surveyed, weights)
    plan, layers, vocab_size = dry_run(plan, folder)
    files = WeightFiles(folder.graph)
    files.check(plan.tensors)
    identity = model_identity(folder.graph, files.paths(plan.tensors), weights)
    return Decoder(layers, plan.fixed, vocab_size, load_params(plan, files), identity, plan)
