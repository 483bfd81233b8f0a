"""Speculative decoding as step times: drafts, one verification of several tokens, and how many of them stay.

A verification gives E tokens of a sequence on average, so a token costs an E-th of it: every sequence advances at the
mean pace, and what varies from verification to verification is averaged out. What is emitted is what the target would
have emitted; the draft only changes when. It refuses to know where drafts come from (a head of the model as in MTP, or
a model of its own) but for what a step of it costs.
"""

from __future__ import annotations

from bisect import bisect_right

from sim.costs.base import CostModel
from sim.costs.segments import Row, SegmentCosts, row_through
from testbed.scenario.rollout import Speculative


def tokens_per_verification(accept_rate: float, steps: int) -> float:
    """Mean tokens of one verification of `steps` drafts that are accepted one after another with the same chance:
    (1 - a^(steps + 1)) / (1 - a), the accepted ones and the target's own (Leviathan et al. 2023, equation 1)."""
    if accept_rate == 1.0:
        return float(steps + 1)
    return (1.0 - accept_rate ** (steps + 1)) / (1.0 - accept_rate)


def mean_tokens(s: Speculative, version: int = 0) -> float:
    """Tokens per verification when `version` versions have been published since the draft was trained."""
    kept = (1.0 - s.accept_decay_per_version) ** version
    if s.accept_rate is not None:
        return tokens_per_verification(s.accept_rate * kept, s.speculative_num_steps)
    assert s.accept_length is not None
    return 1.0 + (s.accept_length - 1.0) * kept


class SpeculativeCosts(SegmentCosts):
    """With q = steps + 1 tokens of each of n sequences to verify, S their contexts' sum and E tokens accepted,

        a token of everybody takes (decode(n q, S) + steps x draft_step_share x decode(n, S)) / E.

    decode(n q, S) is the target's step for n q tokens over the KV of n sequences: as long as it is bound by reading
    weights and KV, the q tokens come for one; when the batch fills, they do not. Prompts pass through the draft too.
    """

    def __init__(self, target: SegmentCosts, s: Speculative, version: int = 0) -> None:
        super().__init__()
        self.kind = target.kind
        self.padded_attention = target.padded_attention
        self.arrival_base_s = target.arrival_base_s
        self.arrival_per_request_s = target.arrival_per_request_s
        self._target = target
        self._s = s
        self._tokens = mean_tokens(s, version)
        self._aged: dict[int, SpeculativeCosts] = {version: self}

    def at_version(self, version: int) -> CostModel:
        """The same engine when `version` versions have been published: drafts age, if the scenario says so."""
        if not self._s.accept_decay_per_version:
            return self
        if version not in self._aged:
            aged = self._aged[version] = SpeculativeCosts(self._target, self._s, version)
            aged._aged = self._aged
        return self._aged[version]

    def _row(self, batch: int) -> Row:
        steps, share = self._s.speculative_num_steps, self._s.draft_step_share
        q = steps + 1
        verify, draft = self._target._row(batch * q), self._target._row(batch)
        ends = sorted({0.0, *(q * x for x in verify.starts[:-1]), *draft.starts[:-1]})
        points = [
            (c, (_at(verify, c / q) + steps * share * _at(draft, c)) / self._tokens) for c in (*ends, ends[-1] + 1.0)
        ]
        return row_through(points, draft.low, draft.high)

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        seconds, outside = self._target._prefill(new_tokens, attention, requests)
        return seconds * (1.0 + self._s.draft_step_share), outside


def _at(row: Row, context: float) -> float:
    """Seconds of a row at a context per sequence."""
    j = bisect_right(row.starts, context) - 1
    return row.values[j] + row.slopes[j] * (context - row.starts[j])
