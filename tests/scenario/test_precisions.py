"""The table of precisions, and where a comparison says that a format is emulated."""

from __future__ import annotations

from testbed.commands.chosen import facts_of
from testbed.scenario.precisions import ALLOWED, REFUSED, computed_in, served_precisions, training_for, why_refused
from tests.support.scenarios import scenario


def test_qm_08_no_pair_is_both_allowed_and_refused_and_every_format_has_a_pair() -> None:
    pairs = [(p.rollout, p.training) for p in ALLOWED]
    assert len(set(pairs)) == len(pairs) and not REFUSED.keys() & set(pairs)
    assert all(p.reason and p.shared == (p.rollout == p.training) for p in ALLOWED)
    assert all(training_for(rollout) for rollout in served_precisions())
    assert training_for("fp6") == () and "nothing documents" in why_refused("fp8", "int8")


def test_arithmetic_of_formats_is_bf16() -> None:
    assert [computed_in(p) for p in ("fp32", "fp16", "bf16", "fp8", "nvfp4")] == [
        "fp32",
        "fp16",
        "bf16",
        "bf16",
        "bf16",
    ]


def test_qm_09_a_comparison_of_real_runs_says_which_formats_are_emulated() -> None:
    def config(engine: str, training: str) -> object:
        return scenario(rollout__engine={"weight_precision": engine}, training={"precision": training})

    plain, mixed, shared = config("bf16", "bf16"), config("fp8", "bf16"), config("nvfp4", "nvfp4")
    facts = facts_of(plain, mixed, shared, real=True)  # type: ignore[arg-type]
    assert "fp8, nvfp4 emulated" in facts["engine_step"]
    assert "nvfp4 emulated" in facts["trainer"] and "fp8" not in facts["trainer"]
    assert "emulated" not in str(facts_of(plain, real=True))  # type: ignore[arg-type]
