"""Reading scenarios: YAML with places, overrides, writing and reading back, and the words other systems use."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed.scenario import Scenario, aliases, fields, source, units
from testbed.scenario.base import Section
from testbed.scenario.errors import Fault, ScenarioError
from testbed.scenario.explain import EXAMPLES
from testbed.scenario.load import build, dump_scenario, load_scenario, parse_scenario, scenario_hash
from testbed.scenario.schema import scenario_schema, study_schema

GOOD = """\
name: good
cluster: {gpu: H100, nodes: 2}
model: {type: preset, name: Qwen3-8B}
workload:
  type: lengths
  reply: {type: lognormal, mean: 2000, sigma: 1.0}
  max_response_length: 8e3
placement:
  mode: disaggregated
  rollout_num_gpus: 8
  actor_num_gpus: 8
rollout:
  admission: {type: fully_async}
weights:
  path: {type: fixed, update_weight_transfer_mode: broadcast}
  transition: {pause_generation_mode: retract, kv: flush}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_loaded_has_scenario_folder_and_lines(good: Path) -> None:
    loaded = load_scenario(good, ["run.seed=3"])
    assert loaded.scenario.workload.max_response_length == 8000
    assert loaded.base_dir == good.parent
    assert loaded.source_lines["placement.rollout_num_gpus"] == 10
    assert loaded.source_lines["rollout.admission.type"] == 13
    assert "run.seed" not in loaded.source_lines
    assert loaded.scenario.run.seed == 3
    assert loaded.remarks == ()


def test_pl_13_unused_gpus_are_said(good: Path) -> None:
    assert load_scenario(good, ["cluster.nodes=4"]).remarks == ("the placement uses 16 of 32 GPUs; 16 are unused",)


def test_data_set_smaller_than_the_run_is_said(good: Path) -> None:
    loaded = load_scenario(good, ["workload.num_tasks=100", "algorithm.rollout_batch_size=32"])
    assert loaded.remarks == ("workload.num_tasks 100 ends the run after at most 3 of 10 batches",)


@pytest.mark.parametrize("missing", ["pause_generation_mode", "kv"])
def test_ws_08_an_update_without_a_declared_rule_is_refused(missing: str, good: Path) -> None:
    """There is no default: what happens to requests in flight and to their KV must both be written."""
    rule = {"pause_generation_mode": "retract", "kv": "flush"}
    kept = next(f"{k}: {v}" for k, v in rule.items() if k != missing)
    good.write_text(GOOD.replace("{pause_generation_mode: retract, kv: flush}", f"{{{kept}}}"))
    with pytest.raises(ScenarioError) as caught:
        load_scenario(good)
    assert str(caught.value).startswith(
        f"{good}:16: weights.transition.{missing}: missing; weights.transition needs it"
    )


# --- overrides --------------------------------------------------------------------------------------------------------


def test_setting_a_type_drops_the_keys_it_does_not_have(good: Path) -> None:
    loaded = load_scenario(
        good,
        [
            "rollout.admission.async_max_concurrent_groups=8",
            "rollout.admission.type=bounded",
            "rollout.admission.max_head_offpolicyness=2",
        ],
    )
    assert loaded.scenario.rollout.admission.model_dump() == {"type": "bounded", "max_head_offpolicyness": 2}


def test_setting_a_mode_keeps_the_keys_both_have(good: Path) -> None:
    loaded = load_scenario(good, ["placement.mode=hybrid"])
    placement = loaded.scenario.placement
    assert (placement.mode, placement.rollout_num_gpus, placement.actor_num_gpus) == ("hybrid", 8, 8)


def test_a_section_with_another_type_replaces_the_old_one(good: Path) -> None:
    loaded = load_scenario(
        good,
        [
            "placement.rollout_num_gpus_per_engine=2",
            "placement={mode: colocated, num_gpus: 16}",
            "rollout.admission.type=sync",
            "weights.path.update_weight_transfer_mode=cuda_ipc",
        ],
    )
    assert loaded.scenario.placement.rollout_num_gpus_per_engine == 1


def test_a_section_without_type_is_merged(good: Path) -> None:
    loaded = load_scenario(good, ["placement={rollout_num_gpus: 12, actor_num_gpus: 4}"])
    assert (loaded.scenario.placement.rollout_num_gpus, loaded.scenario.placement.actor_num_gpus) == (12, 4)


def test_a_key_of_a_default_union_needs_no_type(good: Path) -> None:
    loaded = load_scenario(good, ["experience.buffer.async_data_buffer_capacity_factor=3"])
    assert loaded.scenario.experience.buffer.model_dump() == {
        "type": "insert_when_ready",
        "async_data_buffer_capacity_factor": 3.0,
        "put_when_full": "block",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.sed=3", "--set run.sed=3: run.sed: unknown key (nearest: run.seed)"),
        ("run.seed=-3", "--set run.seed=-3: run.seed: expected a whole number >= 0, got `-3` (nearest: 0)"),
        ("run.seed", "--set run.seed: expected KEY=VALUE, with dots between the parts of KEY (nearest: run.seed=1)"),
        ("name.first=x", "--set name.first=x: name.first: `name` has no keys"),
        ("run={seed: 1", "--set run={seed: 1: run: `{seed: 1` is not a YAML value"),
        (
            "cluster.gpu=B300",
            "--set cluster.gpu=B300: cluster.gpu: `B300` is not one of A100, H100, H200, B200, H20, CPU "
            "(nearest: B200)",
        ),
    ],
)
def test_faults_of_overrides_quote_them(override: str, message: str, good: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(good, [override])
    assert str(caught.value) == message


def test_fault_of_a_rule_shows_the_override_that_caused_it(good: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(good, ["cluster.nodes=1", "run.warmup_steps=10"])
    assert [fault.where for fault in caught.value.faults] == ["--set run.warmup_steps=10", f"{good}:10"]


# --- YAML -------------------------------------------------------------------------------------------------------------


def test_yaml_has_no_surprises() -> None:
    data = source.parse("a: no\nb: 12:30\nc: 1e3\nd: 010\ne: 2024-01-01\nf: 0x10\ng: 1_000\nh: ~\ni: on\n", "x").data
    assert data == {
        "a": "no",
        "b": "12:30",
        "c": 1000.0,
        "d": 10,
        "e": "2024-01-01",
        "f": 16,
        "g": 1000,
        "h": None,
        "i": "on",
    }


def test_merge_keys_and_aliases_keep_their_lines() -> None:
    read = source.parse("a: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\nc: *a\n", "f")
    assert read.data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert read.where[("b", "x")] == "f:2"
    assert read.where[("b", "y")] == "f:6"
    assert read.where[("c", "x")] == "f:2"


def test_place_of_an_unwritten_key_is_its_section() -> None:
    read = source.parse("a:\n  b:\n    c: 1\n", "f")
    assert (read.place(("a", "b", "z")), read.place(("q",))) == ("f:2", "f:1")


@given(st.text(alphabet="ab:{}[]-,&*!|>'\"# \n\t<0.", max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        source.parse(text, "f")
    except ScenarioError as error:
        assert re.match(r"f:\d+: ", str(error))


def test_fault_leaves_out_empty_parts() -> None:
    assert str(Fault("a.b", "wrong")) == "a.b: wrong"
    assert str(Fault("", "wrong", "right", "f:1")) == "f:1: wrong (nearest: right)"


# --- writing ----------------------------------------------------------------------------------------------------------


def test_hash_is_of_content_not_of_form(good: Path, tmp_path: Path) -> None:
    first = load_scenario(good).scenario
    second = parse_scenario(GOOD.replace("8e3", "8000").replace("{gpu: H100, nodes: 2}", "{nodes: 2.0}")).scenario
    assert scenario_hash(first) == scenario_hash(second)
    assert re.fullmatch(r"[0-9a-f]{12}", scenario_hash(first))
    assert scenario_hash(load_scenario(good, ["run.seed=1"]).scenario) != scenario_hash(first)


def _value(draw: st.DrawFn, annotation: Any, metadata: list[Any]) -> Any:
    """A value for one annotation, within the bounds of its metadata."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, *meta = typing.get_args(annotation)
        flat = [m for item in meta for m in getattr(item, "metadata", [item])]
        return _value(draw, base, [*metadata, *flat])
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return draw(st.sampled_from(parts))
    if typing.get_origin(annotation) is tuple:
        return [_value(draw, parts[0], []) for _ in range(draw(st.integers(0, 3)))]
    if typing.get_origin(annotation) is dict:
        return draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers() | st.booleans(), max_size=2))
    if parts:
        return _value(draw, draw(st.sampled_from(parts)), metadata)
    if annotation is type(None):
        return None
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _section(draw, annotation)
    if annotation is bool:
        return draw(st.booleans())
    if annotation is str:
        return draw(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8) | AWKWARD)
    low = next((getattr(m, k) for m in metadata for k in ("gt", "ge") if getattr(m, k, None) is not None), 0)
    high = next((getattr(m, k) for m in metadata for k in ("lt", "le") if getattr(m, k, None) is not None), 10**6)
    return draw(st.integers(low, high) if annotation is int else st.floats(low, high, allow_subnormal=False))


AWKWARD = st.sampled_from(
    ["no", "1e3", "1.0", "12:30", "null", "~", "", "<<", "=", "2024-01-01", "0x1f", "- a", "a: b", "# c"]
)


def _section(draw: st.DrawFn, model: type[Section]) -> dict[str, Any]:
    out = {}
    for name, field in model.model_fields.items():
        if name in ("type", "mode") or field.is_required() or draw(st.booleans()):
            out[name] = _value(draw, field.annotation, list(field.metadata))
    return out


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    data = _section(draw, Scenario)
    try:
        return Scenario.model_validate(data)
    except ValidationError:
        assume(False)
        raise


@given(scenarios())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_reading_what_was_written_gives_an_equal_scenario(scenario: Scenario) -> None:
    again = build(source.parse(dump_scenario(scenario), "dump.yaml"), Scenario)
    assert again == scenario
    assert scenario_hash(again) == scenario_hash(scenario)


def test_dump_is_in_the_order_of_the_sections(good: Path) -> None:
    written = source.parse(dump_scenario(load_scenario(good).scenario), "dump")
    assert list(written.data) == list(Scenario.model_fields)


# --- words and units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", sorted(set(aliases.KEYS.values())))
def test_aliases_lead_to_keys_that_exist(target: str) -> None:
    for key in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", target):
        assert key in fields.paths_of(Scenario)[key.split(".")[-1]]


def test_aliases_lead_to_values_that_exist() -> None:
    words: set[str] = set()

    def walk(model: type[Section]) -> None:
        for field in model.model_fields.values():
            words.update(fields.literals_of(field))
            for section in fields.sections_of(field):
                walk(section)

    walk(Scenario)
    assert set(aliases.VALUES.values()) <= words


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("max_weight_staleness", "experience.staleness.bound"),
        ("max_off_policy_steps", "experience.staleness.bound"),
        ("max_staleness_steps", "experience.staleness.bound"),
        ("unused_samples_handler", "experience.staleness.action"),
        ("in_flight_weight_updates", "weights.transition.pause_generation_mode: in_place"),
        ("use_cache_salt", "weights.transition.kv: salt_by_version"),
        ("trigger_parameter_sync_step", "weights.update_weights_interval"),
        ("colocate", "placement.mode: colocated"),
        ("colocate_all", "placement.mode: colocated"),
    ],
)
def test_names_of_other_systems_are_answered_with_ours(alias: str, key: str, good: Path) -> None:
    """The alias table of the option names, as a user meets it."""
    with pytest.raises(ScenarioError) as caught:
        load_scenario(good, [f"{alias}=1"])
    assert caught.value.nearest == key


def test_examples_for_missing_sections_are_valid(good: Path) -> None:
    for name in ("cluster", "model", "workload", "placement", "rollout", "weights"):
        data = source.parse(GOOD, "x").data | source.parse(EXAMPLES[name], "x").data
        assert Scenario.model_validate(data)


@pytest.mark.parametrize(
    ("text", "key", "number"),
    [
        ("512MB", "update_weight_buffer_size", 512e6),
        ("512 MiB", "update_weight_buffer_size", 512 * 2**20),
        ("3 s", "timeout_s", 3),
        ("1.5 h", "timeout_s", 5400),
        ("50ms", "pause_overhead_s", 0.05),
        ("20us", "latency_ms", 0.02),
        ("400 Gb/s", "ib_gb_per_s", 50),
        ("2 TB", "host_memory_gb_per_node", 2000),
        ("$2.60", "price_usd_per_gpu_hour", 2.6),
        ("16k", "max_response_length", 16000),
        ("3 GB", "timeout_s", None),
    ],
)
def test_quantities_become_numbers_in_the_unit_of_the_key(text: str, key: str, number: float | None) -> None:
    unit, got = units.unit_of(key), units.quantity(text)
    assert unit is not None and got is not None
    assert got.in_unit(unit) == (pytest.approx(number) if number is not None else None)


# --- schema -----------------------------------------------------------------------------------------------------------


def test_schema_describes_every_section() -> None:
    schema = scenario_schema()
    assert set(schema["properties"]) == set(Scenario.model_fields)
    assert schema["$defs"]["Barrier"]["description"] == "All participants pause, copy and resume together."
    assert schema["$defs"]["FixedConcurrency"]["required"] == ["type", "max_concurrent"]
    assert schema["$defs"]["Cluster"]["additionalProperties"] is False


def test_schema_references_are_all_defined() -> None:
    for schema in (scenario_schema(), study_schema()):
        named = set(re.findall(r"#/\$defs/(\w+)", str(schema)))
        assert named <= set(schema["$defs"])
    assert "Scenario" in study_schema()["$defs"]
