"""The functional core: a step is a value, and dropping the value is the rollback.

    python examples/functional_core.py [MODEL_FOLDER]

Planning and bookkeeping are plain Python over an immutable state; the model's forward pass and the one write to the
cache run under `jax.jit` inside `execute` and `commit`. What they return are JAX arrays, so a function of your own
goes on from there. Without a folder it takes the demo model, which the first run downloads and converts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxengine as je
from jaxengine.demo import demo_model_folder
from jaxengine.text import Tokenizer


@jax.jit
def best_and_its_probability(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of logits float32[rows, vocab]: the likeliest tokens int32[rows] and their probabilities float32[rows]."""
    return jnp.argmax(logits, axis=-1), jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)


def main(folder: str | None = None) -> None:
    model = je.load_model(folder or demo_model_folder())
    tokenizer = Tokenizer.from_folder(model.path)

    state = je.init_state(model, je.EngineConfig(max_batch_size=2, num_blocks=64))
    greedy = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0))
    state, request = je.create_request(state, greedy)
    prompt = tokenizer.encode("The capital of France is")
    state, _ = je.begin_turn(state, request, prompt, je.TurnOptions(max_generated_tokens=8))

    # The prefill: plan, execute, commit.
    plan = je.plan_step(state)
    print("prefill:", plan.rows)
    state, events = je.commit(state, je.execute(model, state, plan))

    # A decode step, executed and dropped. Nothing has happened: every leaf of the control value is as before.
    before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(state.control)]
    dropped = je.execute(model, state, je.plan_step(state))
    logits = np.array(dropped.logits, copy=True)
    del dropped
    assert all(map(np.array_equal, before, jax.tree.leaves(state.control)))

    # The same step again gives the same result, to the last bit.
    transaction = je.execute(model, state, je.plan_step(state))
    assert np.array_equal(logits, transaction.logits)
    token, probability = best_and_its_probability(transaction.logits)
    spent = state
    state, events = je.commit(state, transaction)
    assert not events[-1].token >= 0 or events[-1].token == int(token[0])
    print(f"decode: {tokenizer.decode([int(token[0])])!r} with probability {float(probability[0]):.3f}")

    # The commit took the old state's cache over, so the old value can't be used by mistake.
    try:
        je.plan_step(spent)
    except je.SpentStateError as error:
        print("old state:", error)

    # `step` does all three, until nothing is left to run.
    while je.plan_step(state).outcome is je.StepOutcome.COMMITTED:
        state, _ = je.step(model, state)
    state, records = je.drain(state, 100)
    tokens = [record.token for record in records if je.EngineEventFlags.TOKEN in record.flags]
    print("text:", repr(tokenizer.decode(tokens)), "ended by", records[-1].finish_reason.name)
    state = je.close_request(state, request)
    je.check_invariants(state)


if __name__ == "__main__":
    main(*sys.argv[1:])
