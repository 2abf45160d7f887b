"""Drafts take what a step has left over, and proposals last until a choice is made (M4, M5)."""

import dataclasses

import numpy as np
import pytest

import jaxengine as je
from jaxengine.programs import Programs, bucket_for
from jaxengine.toy import LETTERS, continuation, logits_after, next_token, toy_model
from tests.jaxengine.drafting import require_optional
from tests.jaxengine.harness import SMALL, begun, column, finish, tokens_of
from tests.jaxengine.test_draft_commands import MODEL, NEXT, PROMPT, decoding, proposed, stepped
from tests.jaxengine.test_programs import CountingDecoder

OTHER = [9, 2]
FOLLOWS = continuation(OTHER, 20)


def test_C3_M4_the_budget_goes_to_every_row_then_to_drafts_then_to_prefills():
    config = dataclasses.replace(SMALL, max_scheduled_tokens=8)
    state = decoding(config=config, prompts=(PROMPT, OTHER))
    state = je.set_draft_tokens(je.set_draft_tokens(state, 1, NEXT[1:5]), 2, FOLLOWS[1:5])
    plan = require_optional(state)
    assert plan.num_tokens.tolist() == [5, 3]
    state, new = je.create_request(state)
    for count, expected in [(3, [[5, 2, 1], [4, 1, 0]]), (1, [[5, 2, 1], [4, 1, 0]])]:
        mixed, _ = je.begin_turn(state, new, list(range(count)))
        plan = require_optional(mixed)
        assert [plan.num_tokens.tolist(), plan.num_drafts.tolist()] == expected
        mixed, events = je.commit(mixed, je.execute(MODEL, mixed, plan), donate=False)
        je.check_invariants(mixed)
        assert [proposed(mixed, n) for n in (1, 2, new)] == [()] * 3
        mine = [event.token for event in events if event.request_id == 1]
        assert mine == NEXT[1 : 2 + expected[1][0]]


def test_M5_a_row_that_a_step_leaves_out_keeps_its_proposal():
    config = dataclasses.replace(SMALL, max_scheduled_tokens=2, fairness_bound=2)
    prompts = ([9], [8], [7])
    state = decoding(config=config, prompts=prompts, steps=3)
    following = {n: continuation(prompt, 9) for n, prompt in enumerate(prompts, 1)}
    for n in (1, 2, 3):
        generated = column(state, n, "generated")
        state = je.set_draft_tokens(state, n, following[n][generated : generated + 1])
    plan = require_optional(state)
    assert sorted(plan.num_drafts.tolist()) == [0, 0]
    (out,) = {1, 2, 3} - {int(n) for n in plan.request_ids}
    state, _ = stepped(state)
    kept = {n: proposed(state, n) != () for n in (1, 2, 3)}
    assert kept == {n: n == out for n in (1, 2, 3)}


@pytest.mark.parametrize(("others", "ran"), [(0, 9), (1, 6), (2, 2)])
def test_M4_M5_drafts_take_free_blocks_only_and_give_back_those_of_refused_ones(others, ran):
    """Six tokens in two blocks of four: two drafts need no block, six one, nine two."""
    config = dataclasses.replace(SMALL, num_blocks=4)
    state = decoding(config=config, prompts=(PROMPT, *[[n] for n in range(others)]))
    assert len(state.control.free_blocks) == 2 - others
    right = je.set_draft_tokens(state, 1, NEXT[1:10])
    plan = require_optional(right)
    assert plan.num_drafts.tolist() == [ran] + [0] * others
    assert plan.num_reserved.tolist() == [-(-(6 + ran) // 4) - 2] + [0] * others
    wrong = je.set_draft_tokens(state, 1, [NEXT[1], *[(t + 1) % LETTERS for t in NEXT[2:10]]])
    copy, _ = je.commit(wrong, je.execute(MODEL, wrong, je.plan_step(wrong)), donate=False)
    je.check_invariants(copy)
    assert np.array_equal(copy.control.free_blocks, state.control.free_blocks)
    assert tokens_of(copy, 1) == PROMPT + NEXT[:3]
    after, _ = stepped(right)
    assert tokens_of(after, 1) == PROMPT + NEXT[: 2 + ran]
    assert len(after.control.free_blocks) == 0
    assert column(after, 1, "processed") == 6 + ran


def test_M5_whoever_gives_its_blocks_back_keeps_its_proposal_until_its_next_choice():
    config = dataclasses.replace(SMALL, num_blocks=4)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    state = decoding(limit=6, config=config, prompts=prompts)
    while column(state, 2, "place") >= 0:
        following = continuation(prompts[1], 9)[column(state, 2, "generated") :]
        state = je.set_draft_tokens(state, 2, following[:1])
        before = proposed(state, 2)
        require_optional(state)
        state, _ = stepped(state)
    assert proposed(state, 2) == before != ()
    with pytest.raises(je.RequestStateError, match="still at its input"):
        je.set_draft_tokens(state, 2, [])
    while column(state, 2, "processed") < column(state, 2, "input_end"):
        assert proposed(state, 2) == before
        if column(state, 1, "status") == je.RequestStatus.TURN_COMPLETE:
            state = je.close_request(state, 1)
        state, _ = stepped(state)
    assert proposed(state, 2) == ()
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 2) == prompts[1] + continuation(prompts[1], 6)
    assert len(je.close_request(je.close_request(state, 1), 2).control.free_blocks) == 4


def test_M5_A10_cancelling_or_closing_drops_a_proposal_and_frees_what_is_held():
    state = je.set_draft_tokens(decoding(prompts=(PROMPT, OTHER)), 1, NEXT[1:9])
    for ended in (je.cancel_turn(state, 1, 1)[0], je.close_request(state, 1)):
        je.check_invariants(ended)
        plan = je.plan_step(ended)
        assert (plan.request_ids.tolist(), plan.num_drafts.tolist()) == ([2], [0])
    again = je.drain(je.cancel_turn(state, 1, 1)[0], 9)[0]
    again, _ = je.begin_turn(again, 1, [3], je.TurnOptions(2))
    assert proposed(again) == ()
    again, _ = finish(MODEL, je.close_request(again, 2))
    assert tokens_of(again, 1) == PROMPT + NEXT[:1] + [3] + continuation([*PROMPT, NEXT[0], 3], 2)


@pytest.mark.slow
def test_case_C15_choices_behind_drafts_are_drawn_from_the_final_distribution():
    """Ranks of the toy's tokens have one distribution behind any sequence; 512 requests against it, cut by top-k."""
    count, draws = 512, []
    config = je.EngineConfig(max_batch_size=count, max_scheduled_tokens=4 * count, num_blocks=2 * count)
    state = je.init_state(MODEL, config)
    for n in range(count):
        sampling = je.SamplingParams(temperature=0.5, top_k=3, seed=n)
        state, _ = je.create_request(state, je.RequestOptions(sampling=sampling))
        state, _ = je.begin_turn(state, n + 1, [n % LETTERS], je.TurnOptions(9))
    state, _ = stepped(state)
    for n in range(count):
        best = next_token(tokens_of(state, n + 1))
        state = je.set_draft_tokens(state, n + 1, [(best + n % 3) % LETTERS])
    state, _ = stepped(state)
    for n in range(count):
        tokens = tokens_of(state, n + 1)
        draws.append([(t - next_token(tokens[: i + 2])) % LETTERS for i, t in enumerate(tokens[2:])])
    weights = np.exp(np.sort(logits_after([0]))[::-1][:3] / 0.5)
    expected = weights / weights.sum()
    accepted = [ranks for ranks in draws if len(ranks) == 2]
    assert len(accepted) == sum(ranks[0] == n % 3 for n, ranks in enumerate(draws)) > 100
    for ranks in ([r[0] for r in draws], [r[1] for r in accepted]):
        found = np.bincount(ranks, minlength=3)
        assert len(found) == 3
        chi_square = ((found - len(ranks) * expected) ** 2 / (len(ranks) * expected)).sum()
        assert chi_square < 13.8  # the 0.999 quantile of two degrees of freedom


@pytest.mark.parametrize("hybrid", [False, True])
def test_N1_drafts_of_every_length_share_few_programs(hybrid):
    """A model without fixed states runs them in the programs of prefills, but for more rows of logits."""
    toy = toy_model(hybrid=hybrid)
    decoder = CountingDecoder(toy.decoder)
    model = dataclasses.replace(toy, decoder=decoder, programs=Programs(decoder))
    following = continuation([3, 1], 60, hybrid=hybrid)
    state, buckets = begun(model, [3, 1]), set()
    state, _ = stepped(state, model)
    for drafts in [1, 2, 3, 7, 8, 9, 15]:
        done = column(state, 1, "generated")
        state = je.set_draft_tokens(state, 1, following[done : done + drafts])
        buckets.add(bucket_for(je.plan_step(state), SMALL))
        state, events = stepped(state, model)
        assert len(events) == drafts + 1
    assert {(b.tokens, b.logits) for b in buckets} == {(16, 4), (16, 8), (16, 16)}
    assert len(decoder.traced) == 3 + hybrid
    assert model.decoder.traced is decoder.traced
