"""Definitions: one text each, for the glossary, the tooltips and Markdown. It refuses to know figures and markup.

Keys are the ids that terms link to.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from reports.kinds import KINDS
from reports.palette import GPU_TIME


class Definition(Struct, frozen=True):
    term: str
    text: str
    kind: str = ""
    """Kind whose mark stands before the term."""
    cause: str = ""
    """Cause whose swatch stands before the term."""


METRICS: dict[str, Definition] = {
    "g-step": Definition(
        "Step time",
        "Seconds from one batch's last optimizer update to the next batch's, mean over the measured steps (after "
        "warm-up) and over seeds; "
        "± is the standard deviation over seeds.",
    ),
    "g-tps": Definition(
        "Trained tokens per s per GPU",
        "Actor tokens that carried loss ÷ measured time ÷ all GPUs, engines and trainer. Prompt, tool, masked "
        "and dropped tokens do not count.",
    ),
    "g-gps": Definition(
        "Generated tokens per s per GPU",
        "Output tokens of all turns, dropped ones included ÷ measured time ÷ all GPUs.",
    ),
    "g-trajs": Definition(
        "Trained trajectories per s", "Trajectories that a batch took ÷ measured time: the effective samples."
    ),
    "g-usd": Definition("Cost", "Step time × GPUs × USD per GPU-hour, for 1,000 steps. Idle GPUs are paid for."),
    "g-stale": Definition(
        "Staleness",
        "By the scenario's measure, which the section on staleness names; oldest_token: deployed version minus "
        "the oldest version in the "
        "experience, counted in published versions. Read at completion and again at dequeue; the bound acts on "
        "the dequeue reading.",
    ),
    "g-bound": Definition(
        "Staleness bound (η)",
        "The oldest experience that may be trained on as it is; the scenario says what happens to older.",
    ),
    "g-ages": Definition(
        "Where staleness arises",
        "Experience ages while it is generated (until completion) and in the buffer (until dequeue). The two "
        "parts add up.",
    ),
    "g-waste": Definition(
        "Waste", "Generated tokens that never reached the loss (dropped, aborted, filtered) ÷ all generated tokens."
    ),
    "g-corrected": Definition(
        "Corrected", "Trajectories trained with a correction for their staleness ÷ trained trajectories."
    ),
    "g-masked": Definition(
        "Masked", "Tokens that stayed in the context but carried no loss because of their version ÷ generated tokens."
    ),
    "g-idle": Definition(
        "GPU idle",
        "GPU time in which nothing runs, over all pools ÷ (wall time × GPUs). The part-filled tail is not idle "
        "and is shown apart.",
    ),
    "g-over": Definition(
        "Hidden generation",
        "Engine-seconds of generation that run while the trainer trains ÷ all engine-seconds of generation.",
    ),
    "g-even": Definition(
        "Break-even",
        "Cost per step of the baseline ÷ that of the answer: how many times more steps the answer may need "
        "before the baseline is the cheaper run.",
    ),
    "g-update": Definition(
        "Weight update",
        "From the order to prepare until the last engine has resumed: prepare, drain, copy, requantise, barrier.",
    ),
    "g-drain": Definition(
        "Drain",
        "From the first request to pause until every participant is paused; under `finish`, until the requests "
        "in flight have ended.",
    ),
    "g-pause": Definition(
        "Pause",
        "From EnginePaused to EngineResumed, mean over engines. Shorter than the weight update where a part of "
        "it overlaps generation.",
    ),
    "g-barrier": Definition(
        "Barrier", "Wait of the first participant that is ready for the last. No participant resumes before it."
    ),
    "g-effective": Definition(
        "Effective to first request", "From the last EngineResumed to the first turn started on the new version."
    ),
    "g-reuse": Definition(
        "KV reuse",
        "Prompt tokens taken from the cache ÷ prompt tokens of all model calls. It comes out of the cache's "
        "state, never from a fixed ratio.",
    ),
    "g-retract": Definition(
        "Retraction",
        "A running request that an engine put back into its queue, for lack of KV memory or for a weight update.",
    ),
    "g-programs": Definition(
        "Program",
        "A trajectory with its tools, from its first model call to its last. A paused one gets no call, and its KV "
        "may be evicted; its environment stays.",
    ),
    "g-thrash": Definition(
        "Contexts over KV",
        "The tokens of all programs that have begun ÷ the KV slots of all engines. Above 1 they evict each other.",
    ),
    "g-bias": Definition(
        "Sampling bias of a tail rule",
        "Early stops and redundant members favour what ends soon. Shares and delays are by planned length and by the "
        "task's success rate, over the whole run; only a simulation knows how long what was given up would have been.",
    ),
    "g-t-queue": Definition("Queue", "Submitted, not yet worked on by an engine: the core's queue and the engine's."),
    "g-t-prefill": Definition("Prefill", "From an engine's first work on a turn to its first token."),
    "g-t-decode": Definition("Decode", "From the first token of a turn to its last."),
    "g-t-tool": Definition("Tool", "A tool works on the turn's call."),
    "g-t-environment": Definition("Environment", "The tool environment is prepared."),
    "g-t-paused": Definition(
        "Paused", "Its engine stood still for a weight update or a phase switch while it was in flight."
    ),
    "g-t-held": Definition("Program paused", "It wanted a model call while its program was paused or not let in."),
    "g-t-waits_for_signals": Definition(
        "Waits for signals", "From a trajectory's last token until its rewards, log-probs or values are there."
    ),
    "g-t-waits_for_group": Definition(
        "Waits for its group", "From a trajectory's own readiness until every member of its group is ready."
    ),
    "g-t-in_buffer": Definition(
        "In the buffer",
        "From group ready until the batch that holds it is taken. In the buffer is not ready; ready is not taken.",
    ),
    "g-t-total": Definition("Trajectory, total", "From submission until the batch that holds it is taken."),
}

REWARD: dict[str, Definition] = {
    "g-reward": Definition(
        "Reward",
        "Mean reward of the trajectories of a batch. The first and the last fifth are those of all batches of a run, "
        "the warm-up's too, one batch at least; then mean over seeds.",
    ),
    "g-rise": Definition(
        "Rise", "Reward of the last fifth of the batches minus that of the first, for each seed by itself."
    ),
}
"""Terms of the figures that real runs alone have."""

LEARNING: dict[str, Definition] = {
    "g-l-engine": Definition(
        "Engine difference",
        "KL(engine || trainer) of the sampled tokens, k3 estimate: the log-probs that the engine gave them against the "
        "trainer’s own before the batch’s first update. With equal weights it is what kernels and number formats make "
        "of them; corrections do not change it.",
    ),
    "g-l-update": Definition(
        "Update difference",
        "KL(trainer before the batch || trainer now), k3, where an update begins, mean over the batch’s updates: the "
        "same engine, other weights. The first update of a batch has 0.",
    ),
    "g-l-mismatch": Definition(
        "Engine and update difference together",
        "KL(engine || trainer now), k3. Without recomputed log-probs (`algorithm.recompute_old_log_probs`) the two are "
        "not known apart.",
    ),
    "g-l-teacher": Definition(
        "KL to the teacher",
        "KL(student || teacher) on the student’s own tokens, by the student before the update. k1 is the mean of "
        "log p student − log p teacher, the distillation signal with its sign turned; k3 has the same mean and is "
        "never negative.",
    ),
    "g-l-reference": Definition(
        "KL to the reference", "KL(policy || frozen start model) where an update begins, by the scenario’s estimate."
    ),
    "g-l-engine-ratio": Definition(
        "Engine ratio",
        "p(trainer before the batch’s first update) ÷ p(engine when sampled) of one trained token. With equal weights "
        "it is what kernels and number formats make of them.",
    ),
    "g-l-ratio": Definition(
        "Loss ratio",
        "The ratio that the loss reads, before any limit: p(trainer now) over p(engine when sampled), or over that of "
        "the trainer before the batch where the loss says so; of a token, or of its sequence under GSPO. Tokens of all "
        "updates.",
    ),
    "g-l-formats": Definition(
        "Formats", "What engines serve the weights in, and what the trainer’s forward pass computes with."
    ),
    "g-l-clip": Definition(
        "Clipped", "Trained tokens whose ratio has left its bound in the favourable direction, so they push no further."
    ),
    "g-l-truncated": Definition("Truncated weights", "Trained tokens whose correction weight was brought to a bound."),
    "g-l-limited": Definition(
        "Masked by limits", "Tokens that the limits on correction weights took out; they stay in the denominators."
    ),
    "g-l-ess": Definition(
        "Effective sample size", "(Σw)² ÷ (N Σw²) of the correction weights w: 100 % if all N tokens count the same."
    ),
    "g-l-norm": Definition("Gradient norm", "Of the whole model over all ranks, before clipping."),
    "g-l-value": Definition("Value loss", "Half the squared error of the critic’s values, bounded, mean over tokens."),
    "g-l-explained": Definition(
        "Explained variance", "1 − Var(return − value) ÷ Var(return), of the values before the update. 1 is perfect."
    ),
    "g-l-fallback": Definition(
        "Routed without a record",
        "Positions that should have run the experts that generation recorded and had no record.",
    ),
    "g-l-bytes": Definition(
        "Weights of an engine",
        "Bytes of all weights in the format that the engine serves, from the model’s shapes. Where a format is "
        "emulated (quantised and dequantised), the engine’s memory holds more.",
    ),
}
"""Terms of what updates did."""

CAUSES: dict[str, Definition] = {
    f"g-c-{name}": Definition(c.label, c.definition, cause=name) for name, c in GPU_TIME.items()
}

KIND_TERMS: dict[str, Definition] = {f"g-k-{k.name}": Definition(k.name, k.definition, kind=k.name) for k in KINDS}


def metric_terms(rewarded: bool, updates: Collection[str] = ()) -> dict[str, Definition]:
    """id -> definition of the metrics that a report has; `updates`: ids of what its updates are said to have done."""
    return METRICS | (REWARD if rewarded else {}) | {id_: d for id_, d in LEARNING.items() if id_ in updates}


def groups(rewarded: bool, updates: Collection[str] = ()) -> dict[str, dict[str, Definition]]:
    """Heading -> id -> definition, in the order of the page."""
    metrics = metric_terms(rewarded, updates)
    return {"Metrics": metrics, "Causes of GPU time": CAUSES, "Kinds of numbers": KIND_TERMS}
