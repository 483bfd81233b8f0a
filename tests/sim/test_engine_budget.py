"""The running sums behind admission, against sums over the batch."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from sim.admission_budget import CLIP_MAX_NEW_TOKENS, FutureTokens, NewTokenRatio
from sim.engine_request import Request


@given(st.lists(st.tuples(st.sampled_from("ajls"), st.integers(0, 9000)), max_size=40))
def test_future_tokens_equal_the_sum_over_the_batch(operations) -> None:
    future, steps, batch, places = FutureTokens(), 0, [], count(1)
    for what, number in operations:
        if what in "aj":
            r = Request(rid=len(batch), content=(), prompt_tokens=0, output_tokens=1, max_new_tokens=1)
            r.seq = next(places)
            future.add(r, number + steps, steps)
            batch.append((number + steps, r))
        elif what == "l" and batch:
            _, r = batch.pop(number % len(batch))
            future.remove(r)
            if number % 3 == 0:  # comes back at the same instant with the same quota
                quota = r.quota
                r.seq = next(places)
                future.add(r, quota, steps)
                batch.append((quota, r))
        elif what == "s":
            steps += number
            for quota, r in [b for b in batch if b[0] < steps]:  # nobody runs beyond its quota
                future.remove(r)
                batch.remove((quota, r))
        assert future.total(steps) == sum(min(q - steps, CLIP_MAX_NEW_TOKENS) for q, _ in batch)
        assert future.linear == sum(q - steps < CLIP_MAX_NEW_TOKENS for q, _ in batch)


@given(st.floats(0.01, 2.0), st.integers(1, 700), st.lists(st.integers(1, 400), max_size=8))
def test_new_token_ratio_is_the_same_stepwise_and_at_once(conservativeness: float, decay: int, jumps) -> None:
    """init = min(0.7 x conservativeness, 1), minimum = 0.14 init, linear decay over the given steps."""
    ratio = NewTokenRatio(conservativeness, decay)
    current = init = min(0.7 * conservativeness, 1.0)
    for k in jumps:
        ratio.taken += k
        for _ in range(k):
            current = max(current - (init - init * 0.14) / decay, init * 0.14)
        assert ratio.value() == current
    ratio.set(0.9)
    assert ratio.value() == 0.9
    ratio.reset()
    assert ratio.value() == init


def test_the_ratio_rises_to_its_minimum_after_a_low_retraction() -> None:
    ratio = NewTokenRatio(1.0, 600)
    ratio.set(0.0)
    ratio.taken += 1
    assert ratio.value() == ratio.minimum
