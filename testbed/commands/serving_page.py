"""The page `docs/serving-points.md`: how the points were simulated, the errors, why the worst groups have them.

It refuses to know how errors are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from testbed.commands.serving_errors import BY, Compared, Group, Spread, groups, headlines, reasons
from testbed.commands.serving_points import LeftOut

ABOUT = """
Measured points: `testbed/data/serving_points.csv` (published). Step tables: `testbed/data/serving_step_tables.csv.gz`
(measured kernels, composed by aiconfigurator-core 0.12.0). Overheads: `testbed/data/serving_overheads.json`
(calibrated on the points named below). The points come with the package of the tables, whose constants may have been
tuned on them: tables and points are not strictly independent.

Each point is a closed loop: as many clients as the point says, ten requests each, all starting at once, every request
counted, means reported. Lengths are uniform from 0.8 to 1 times isl and osl where the published launch scripts say so
(random-range-ratio 0.8). The engine is the project's model of SGLang's scheduler, or of vLLM's, which puts prompts
and replies into one step.

Error: simulated / measured - 1. "Tables" counts kernels alone; "with overheads" adds what the host and the
all-reduces take beyond them. Means and medians are of sizes, p10 to p90 have signs.
"""

OVERHEADS = """
Step = table + step + sequence x sequences + all-reduce x 2 x layers (on more than one GPU). Least squares of relative
TPOT errors, fitted to Qwen3-32B (both engines) and to Llama-3.1-70B on H200, and to nothing else; ± half of the 95 %
interval. `sglang` schedules while the device computes, and so does `vllm` from 0.14 on or where it was launched so;
`vllm, synchronous` (0.12) does not. On the predicted points the overheads help where the tables are too fast; they can
only hurt where the tables alone are too slow (see the causes). A scenario asks for them with
`simulation: {engine_costs: {type: measured, overheads: true}}`.
"""

MENDED = """
Mended with no coefficient: a step that computes prompts and replies reads the weights once
(`SegmentCosts.mixed_time`). Attention over an 8-bit KV cache is timed as over a 16-bit one (Llama-3.1-70B; the 8-bit
rows are up to 20 % too fast for a whole step with long contexts, on one GPU too, where no all-reduce explains it).

Launch options are published for DeepSeek, Qwen3.5, Llama-3.1-70B, gpt-oss, MiniMax and Kimi. Elsewhere two were
inferred from TTFT, not from TPOT: vLLM 0.12 has max_num_batched_tokens 2,048 (the scheduler's own default; with 8,192
short prompts would wait 1.5 to 3 times too long), and the clients of Llama-3.1-8B before SGLang send lengths that
differ by up to 5 % (with equal lengths they stay in step, and on one and two GPUs prompts would wait 2 to 4 times as
long as measured). The other unpublished clients send equal lengths: TTFT of Qwen3-32B before SGLang is that of whole
waves.

The split and these readings were chosen with all points in view (the 8-bit one on Llama-3.1-70B, whose H100 points
count as predicted): only the coefficients are strictly held out.
"""

EXPLAINED_FROM = 0.1
"""Mean error from which a group's cause is given."""

CAUSES = {
    "Llama-3.1-8B-Instruct-FP8, vllm": """
        the tables compute prompts at half the measured rate. The shortest points need up to 81 % of the GPUs' FP8
        peak if every prompt token is computed, and vLLM reuses prefixes unless told not to; whether these prompts
        repeat was not recorded""",
    "Qwen3-235B-A22B-FP8, vllm": """
        measured TPOT is 51 to 59 ms from 4 to 20 clients: a floor that does not depend on the batch, as of kernels
        that are launched one by one; the tables are of replayed graphs""",
    "Kimi-K2.5, vllm": """
        the table's latent attention takes 94 us a layer at 4 sequences (SGLang's: 64 us) and is half of a step:
        measured steps are shorter than these kernels alone. One of three repeats at 1,024 x 8,192 and 16 clients took
        4 times as long as the others""",
    "MiniMax-M2.5, vllm": """
        dense products with block-scaled FP8 weights take 59 us each in vLLM's tables whatever their shape, 10 us in
        SGLang's: launches that a served engine hides in graphs""",
    "gpt-oss-120b, vllm": """
        three points of 512 clients have a TPOT below that of 64 clients on the same engine: by their neighbours and
        Little's law it held far fewer requests than 512 at a time. The others miss by 9 % on average; their prompts
        take 1.7 times as long as in the tables (TTFT)""",
    "Qwen3-235B-A22B-FP8, sglang": """
        measured TPOT is 15 to 17 ms from 2 to 9 clients and short prompts, on 2 and on 4 GPUs: a floor of some 170 us
        a layer that the tables do not have; prompts are computed at half the tables' rate (TTFT)""",
    "Qwen3.5-397B-A17B, sglang": """
        60 layers of linear and full attention in many small kernels: 3.5 ms a step more than the tables at 4 clients;
        1,024 x 1,024 at 16 clients was measured at 1.7 times the TPOT of 1,024 x 8,192""",
    "DeepSeek-V3, sglang": """
        the tables alone meet it (6 %): overheads that were fitted to a dense model on H100 are more than this engine
        has""",
    "Llama-3.1-8B-Instruct, sglang": """
        up to 512 clients on a small model: one process detokenises and streams up to 17,000 tokens/s, which takes
        longer than the fitted 14 us a sequence""",
}
"""Our reading of the numbers, not measured."""


def markdown(
    compared: Sequence[Compared], left_out: Sequence[LeftOut], coefficients: Mapping[str, Any], command: str
) -> str:
    """`coefficients`: the overheads by way of scheduling, as fitted."""
    lines = [
        "# Serving points: measured TTFT and TPOT against the step tables",
        "",
        f"Made by `{command}`.",
        "",
        *_text(ABOUT),
    ]
    lines += [*_table("part", headlines(compared)), "", "## Overheads of a step", "", *_text(OVERHEADS)]
    lines += ["| scheduling | points | step, us | sequence, us | all-reduce, us |", "|---|---|---|---|---|"]
    for mode, f in coefficients.items():
        pairs = zip((f.step_us, f.sequence_us, f.collective_us), f.plus_minus, strict=True)
        cells = " | ".join(f"{value:.1f} ± {more:.1f}" for value, more in pairs)
        lines.append(f"| {mode.replace('_', ', ')} | {f.points} | {cells} |")
    lines += ["", *_text(MENDED)]
    found = groups(compared)
    for by in BY:
        lines += [f"## By {by}", "", *_table(by, [g for g in found if g.by == by]), ""]
    lines += ["## Causes", "", *_causes(compared), ""]
    lines += [
        "## Measurements that others contradict",
        "",
        "Counted everywhere but in the last line of the first table.",
        "",
    ]
    lines += [
        f"- {c.point.id}: TPOT {c.point.tpot_ms:.2f} ms measured, {c.answer.tpot_ms:.2f} ms simulated"
        for c in compared
        if c.contradicted
    ]
    lines += ["", "## Left out", "", "| points | why |", "|---|---|"]
    lines += [f"| {n} | {reason} |" for reason, n in reasons(left_out)]
    return "\n".join([*lines, ""])


def _text(paragraphs: str) -> Iterator[str]:
    for paragraph in paragraphs.strip().split("\n\n"):
        yield from (" ".join(paragraph.split()), "")


def _causes(compared: Sequence[Compared]) -> Iterator[str]:
    whole = 100 * mean(abs(c.tpot) for c in compared)
    for name, cause in CAUSES.items():
        part = [c.tpot for c in compared if f"{c.point.model}, {c.point.backend}" == name]
        if part and mean(map(abs, part)) >= EXPLAINED_FROM:
            size = f"mean {100 * mean(map(abs, part)):.0f} %, median {100 * median(part):+.0f} %"
            share = 100 * sum(map(abs, part)) / len(compared)
            carries = f"{share:.1f} of the {whole:.1f} % over all points"
            yield f"- **{name}** ({len(part)} points, {size}, {carries}): {' '.join(cause.split())}."


def _table(head: str, rows: Sequence[Group]) -> list[str]:
    lines = [
        f"| {head} | points | TPOT, tables: mean (median) | TPOT, with overheads: mean (median) | p10, p50, p90 "
        "| TTFT: median | p10, p50, p90 |",
        "|---|---|---|---|---|---|---|",
    ]
    for g in rows:
        lines.append(
            f"| {g.name} | {g.tpot.points} | {_sizes(g.bare_tpot)} | {_sizes(g.tpot)} | {_deciles(g.tpot)} "
            f"| {100 * g.ttft.median:.0f} % | {_deciles(g.ttft)} |"
        )
    return lines


def _sizes(s: Spread) -> str:
    return f"{100 * s.mean:.1f} % ({100 * s.median:.1f} %)"


def _deciles(s: Spread) -> str:
    return ", ".join(f"{100 * x:+.0f} %" for x in (s.p10, s.p50, s.p90))
