"""Tables made with the optional package. A small stand-in with a closed form takes its place: it need not be there."""

from __future__ import annotations

import csv
import json
import sys
from importlib.machinery import ModuleSpec
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs import CostModel, CostModelError, cost_model, tabulate
from sim.costs.tables import step_tables
from sim.costs.tabulate import EngineKind, hugging_face_config, table_for, whole_grid
from sim.run import simulate
from testbed import cli
from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, model_names, model_preset
from testbed.scenario.rules import _context, check
from testbed.scenario.rules.inputs import table_knows_engine
from tests.support.scenarios import scenario, tree

PACKAGE = "aiconfigurator_core"

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""The grid of the bundled file, as `testbed/data` has it: 90 decode points, and prompts of these lengths."""


def decode_ms(batch: int, context: float) -> float:
    """Invented, linear in the batch and in the total context: interpolation between any points meets it."""
    return 5.0 + 0.25 * batch + 0.0005 * batch * context


def prefill_ms(tokens: float, pairs: float) -> float:
    """Invented: weights, tokens, query-key pairs."""
    return 2.0 + 0.5 * tokens + 2e-4 * pairs


class NoData(RuntimeError):
    """What the package raises for a point that its kernel tables don't reach."""


class Package:
    """Stand-in for `aiconfigurator_core`, with a record of what it was asked. `lacks`: (phase, batch, tokens) ->
    whether it has no data there."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.asked: list[tuple[str, int, int]] = []
        self.lacks = lambda phase, batch, tokens: False
        self.refuses = ""

    def compile(self, model_path: str, system: str, backend: str, **options: Any) -> Package:
        if self.refuses:
            raise ValueError(self.refuses)
        config = json.loads((Path(model_path) / "config.json").read_text("utf-8"))
        self.compiled.append({"config": config, "system": system, "backend": backend, **options})
        return self

    def predict_prefill_latency(self, batch: int, tokens: int, prefix: int) -> float:
        assert prefix == 0
        self._note("prefill", batch, tokens)
        return prefill_ms(batch * tokens, batch * tokens**2 / 2)

    def decode_step_latency(self, batch: int, context: int, output_tokens: int) -> float:
        assert output_tokens == 2  # the one step after the first token
        self._note("decode", batch, context)
        return decode_ms(batch, context)

    def _note(self, phase: str, batch: int, tokens: int) -> None:
        self.asked.append((phase, batch, tokens))
        if self.lacks(phase, batch, tokens):
            raise NoData(f"no kernel of {tokens} tokens\nand a long list of what was tried")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Package:
    """The stand-in in the place of the package, and a cache folder of this test's own."""
    fake = Package()
    names = (PACKAGE, f"{PACKAGE}.sdk", f"{PACKAGE}.sdk.engine", f"{PACKAGE}.sdk.errors")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    modules[f"{PACKAGE}.sdk.engine"].EngineHandle = fake  # type: ignore[attr-defined]
    modules[f"{PACKAGE}.sdk.errors"].PerfDataNotAvailableError = NoData  # type: ignore[attr-defined]
    monkeypatch.setattr(tabulate, "version", lambda _: "0.12.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # what `find_spec` takes for "not there"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def unusable_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Installed as far as can be seen without importing it."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("raise ImportError('built for another machine')\n")
    for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama(**changes: Any) -> Scenario:
    """Llama-3.1-8B on one H100 an engine: not in the bundled table."""
    return scenario(
        **{"model__name": "Llama-3.1-8B", "simulation__engine_costs": {"type": "measured"}, "cluster__gpus_per_node": 8}
        | changes
    )


def costs_of(s: Scenario) -> CostModel:
    return cost_model(s, model_preset(s.model.name), gpu_spec(s.cluster.gpu))  # type: ignore[union-attr]


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "rl-testbed" / "tables").iterdir())


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_grid_is_that_of_the_bundled_file(package: Package) -> None:
    costs_of(llama())
    decode = {(b, c) for phase, b, c in package.asked if phase == "decode"}
    prefill = {(b, s) for phase, b, s in package.asked if phase == "prefill"}
    assert decode == {(b, c) for b in BATCHES for c in CONTEXTS}
    assert {s for b, s in prefill if b == 1} == set(LENGTHS)
    assert {b for b, _ in prefill} == {1, 4, 16}
    assert len(package.asked) == len(set(package.asked)) == 121  # 2,420 rows of 20 engine kinds


@pytest.mark.parametrize(
    ("gpu", "system", "sglang"),
    [
        ("A100", "a100_sxm", "0.5.10"),
        ("H100", "h100_sxm", "0.5.14"),
        ("H200", "h200_sxm", "0.5.14"),
        ("B200", "b200_sxm", "0.5.14"),
    ],
)
def test_a_dense_engine_is_described(package: Package, gpu: str, system: str, sglang: str) -> None:
    table_for(model_preset("Llama-3.1-8B"), gpu, 4, "bf16", "bf16")
    (asked,) = package.compiled
    assert asked.pop("config")["architectures"] == ["LlamaForCausalLM"]
    assert asked == {
        "system": system,
        "backend": "sglang",
        "backend_version": sglang,
        "tp_size": 4,
        "gemm_quant_mode": "bfloat16",
        "fmha_quant_mode": "bfloat16",
        "kvcache_quant_mode": "bfloat16",
    }


def test_experts_are_spread_over_the_engine_and_fp8_is_in_blocks(package: Package) -> None:
    table = table_for(model_preset("Qwen3-235B-A22B"), "H100", 4, "fp8", "bf16")
    (asked,) = package.compiled
    assert (asked["tp_size"], asked["moe_tp_size"], asked["moe_ep_size"]) == (4, 1, 4)
    assert (asked["gemm_quant_mode"], asked["moe_quant_mode"]) == ("fp8_block", "fp8_block")
    assert (asked["fmha_quant_mode"], asked["kvcache_quant_mode"]) == ("bfloat16", "bfloat16")
    assert table.expert_parallel == 4


ARCHITECTURES = {
    "Qwen3-14B": "Qwen3ForCausalLM",
    "Qwen2.5-7B": "Qwen2ForCausalLM",
    "Llama-3.1-70B": "LlamaForCausalLM",
    "Qwen3-30B-A3B": "Qwen3MoeForCausalLM",
    "DeepSeek-V3": "DeepseekV3ForCausalLM",
    "Kimi-K2": "DeepseekV3ForCausalLM",
}
"""As the models' own `config.json` files say."""


def test_the_config_says_what_the_models_own_says() -> None:
    """`models.json` holds the numbers of the public configs under their names."""
    public = json.loads((files("testbed") / "data" / "models.json").read_text("utf-8"))
    for hub, numbers in public.items():
        name = hub.split("/")[-1]
        if name.startswith("GLM"):
            continue
        config = hugging_face_config(model_preset(name))
        implied = {"attention_bias", "qk_norm"}  # by the architecture; a config.json doesn't spell them out
        wanted = {k: v for k, v in numbers.items() if k not in implied}
        wanted.setdefault("head_dim", config["head_dim"])
        assert wanted.items() <= config.items(), name
        if name in ARCHITECTURES:
            assert config["architectures"] == [ARCHITECTURES[name]]


@pytest.mark.parametrize("name", [n for n in model_names() if n.startswith("GLM")])
def test_shared_experts_beside_grouped_query_attention_are_refused(package: Package, name: str) -> None:
    """The package's class for such models reads neither shared experts nor leading dense layers: its times are too
    short."""
    with pytest.raises(CostModelError, match="no mixture of experts with grouped-query attention and shared experts"):
        table_for(model_preset(name), "H100", 8, "bf16", "bf16")
    assert package.compiled == []


def test_latent_attention_of_other_sizes_is_refused(package: Package) -> None:
    for change in ({"kv_lora_rank": 256}, {"head_dim": 128}, {"shared_experts": 2}):
        model = msgspec.structs.replace(model_preset("DeepSeek-V3"), name="other", **change)
        with pytest.raises(CostModelError, match="latent attention only with DeepSeek-V3's"):
            table_for(model, "H100", 8, "fp8", "bf16")
    assert package.compiled == []


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_milliseconds_become_seconds(package: Package) -> None:
    m = costs_of(llama())
    assert m.kind == "measured"
    for batch, per in ((1, 128), (3, 700), (48, 3072), (500, 60_000)):
        assert m.decode_time(batch, batch * per) == pytest.approx(decode_ms(batch, per) * 1e-3, rel=1e-6)
    for new, cached in ((512, 0), (8192, 0), (1000, 20_000)):
        pairs = new * (cached + new / 2)
        assert m.prefill_time(new, pairs, 1) == pytest.approx(prefill_ms(new, pairs) * 1e-3, rel=1e-6)
    assert m.outside_share == {"decode": 0.0, "prefill": 0.0}


def test_points_without_data_are_left_out(package: Package) -> None:
    """No large batches of long contexts, no long prompts: the rest is interpolated as before, and the edge is known."""
    most = {"decode": 256 * 32_768, "prefill": 8192}
    package.lacks = lambda phase, batch, tokens: batch * tokens > most[phase]
    m = costs_of(llama())
    for batch, per in ((1, 128), (100, 9000), (256, 32_768), (512, 65_536)):
        assert m.decode_time(batch, batch * per) == pytest.approx(decode_ms(batch, per) * 1e-3, rel=1e-6)
    assert m.outside_share["decode"] == pytest.approx(1 / 4)
    assert m.prefill_time(8192, 8192**2 / 2, 1) == pytest.approx(prefill_ms(8192, 8192**2 / 2) * 1e-3, rel=1e-6)
    m.prefill_time(16_384, 16_384**2 / 2, 1)
    assert m.outside_share["prefill"] == pytest.approx(1 / 2)


Grids = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)))


@settings(max_examples=100, deadline=None)
@given(Grids)
def test_a_grid_without_gaps(points: set[tuple[int, int]]) -> None:
    table = {p: 1.0 for p in points}
    kept = whole_grid(table)
    assert kept.items() <= table.items()
    assert set(kept) == {(c, b) for c in {c for c, _ in kept} for b in {b for _, b in kept}}
    assert bool(kept) == bool(points)
    assert whole_grid(kept) == kept


def test_a_whole_grid_stays_and_the_emptiest_line_goes() -> None:
    full = {(c, b): 1.0 for c in CONTEXTS for b in BATCHES}
    assert whole_grid(full) == full
    without_largest = {p: t for p, t in full.items() if p[1] != 512 or p[0] < 1024}
    assert whole_grid(without_largest) == {p: t for p, t in full.items() if p[1] != 512}


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_asked(package: Package, tmp_path: Path) -> None:
    first = table_for(model_preset("Llama-3.1-8B"), "H100", 1, "bf16", "bf16")
    asked = len(package.asked)
    second = table_for(model_preset("Llama-3.1-8B"), "H100", 1, "bf16", "bf16")
    assert (len(package.compiled), len(package.asked)) == (1, asked)
    assert first == second  # to the last bit: both runs of one scenario are the same
    (path,) = cached_files(tmp_path)
    with path.open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    bundled = files("testbed") / "data" / "aiconfigurator_sglang_step_latency_h100_h200.csv"
    with bundled.open(encoding="utf-8") as f:
        assert list(rows[0]) == next(csv.reader(f))
    assert len(rows) == 121
    row = next(r for r in rows if (r["phase"], r["batch_size"], r["context_tokens"]) == ("decode_step", "32", "2048"))
    assert (row["system"], row["model"], row["tp_size"], row["moe_ep_size"]) == ("h100_sxm", "Llama-3.1-8B", "1", "")
    assert float(row["latency_ms"]) == pytest.approx(decode_ms(32, 2048), abs=5e-5)


def test_every_part_of_the_key_counts(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama8, llama70 = model_preset("Llama-3.1-8B"), model_preset("Llama-3.1-70B")
    kinds = [
        (llama8, "H100", 1, "bf16"),
        (llama70, "H100", 1, "bf16"),
        (llama8, "H200", 1, "bf16"),
        (llama8, "H100", 2, "bf16"),
        (llama8, "H100", 1, "fp8"),
    ]
    for kind in kinds:
        table_for(*kind, "bf16")
    assert len(cached_files(tmp_path)) == len(package.compiled) == 5
    monkeypatch.setattr(tabulate, "version", lambda _: "0.13.0")
    table_for(*kinds[0], "bf16")
    assert len(cached_files(tmp_path)) == len(package.compiled) == 6
    # the name of a model is not part of what it is
    assert tabulate.cache_path(EngineKind(model_preset("Qwen2.5-7B"), "H100", 1, "bf16")) == tabulate.cache_path(
        EngineKind(model_preset("Qwen2.5-Math-7B"), "H100", 1, "bf16")
    )


@pytest.mark.parametrize("text", ["", "nonsense\n1,2\n", "cut"])
def test_a_broken_cache_file_is_made_again(package: Package, tmp_path: Path, text: str) -> None:
    before = table_for(model_preset("Llama-3.1-8B"), "H100", 1, "bf16", "bf16")
    (path,) = cached_files(tmp_path)
    whole = path.read_text("utf-8")
    path.write_text(whole[: len(whole) // 3] if text == "cut" else text)
    assert table_for(model_preset("Llama-3.1-8B"), "H100", 1, "bf16", "bf16") == before
    assert len(package.compiled) == 2
    assert [p.read_text("utf-8") for p in cached_files(tmp_path)] == [whole]


def test_a_cache_that_cannot_be_written_is_done_without(package: Package, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert costs_of(llama()).kind == "measured"


def test_the_cache_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):  # the XDG specification: relative paths are invalid and ignored
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert tabulate.cache_folder() == tmp_path / ".cache" / "rl-testbed" / "tables"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert tabulate.cache_folder() == tmp_path / "x" / "rl-testbed" / "tables"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_package")
def test_without_the_package_both_ways_out_are_named(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"has no Llama-3\.1-8B in bf16") as refused:
        costs_of(llama())
    assert "`pip install 'rl-testbed[tables]'`" in refused.value.nearest
    assert "`engine_costs: {type: analytic}`" in refused.value.nearest
    (fault,) = check(llama(), tmp_path)
    assert fault.key == "simulation.engine_costs.type"
    assert fault.nearest.startswith("pip install 'rl-testbed[tables]', or simulation.engine_costs: {type: analytic}")


@pytest.mark.usefixtures("unusable_package")
def test_reading_a_scenario_does_not_import_the_package(tmp_path: Path) -> None:
    assert check(llama(), tmp_path) == []
    assert PACKAGE not in sys.modules
    with pytest.raises(CostModelError, match="installed but can't be imported") as refused:
        costs_of(llama())
    assert "built for another machine" in refused.value.message
    assert "`engine_costs: {type: analytic}`" in refused.value.nearest


def test_reading_a_scenario_does_not_tabulate(package: Package, tmp_path: Path) -> None:
    assert check(llama(), tmp_path) == []
    assert package.compiled == []


@pytest.mark.usefixtures("unusable_package")
def test_the_bundled_table_comes_first() -> None:
    assert table_for(model_preset("Qwen3-8B"), "H100", 1, "bf16", "bf16") is step_tables()["H100", "Qwen3-8B", 1]


OUT_OF_REACH: dict[str, dict[str, Any]] = {
    "no tables of this GPU": {"cluster__gpu": "H20"},
    "precision": {"rollout__engine": {"weight_precision": "nvfp4"}},
    "KV": {"rollout__engine": {"kv_cache_dtype": "fp8"}},
    "more GPUs than its collectives": {
        "cluster__nodes": 4,
        "placement": {
            "mode": "disaggregated",
            "rollout_num_gpus": 16,
            "actor_num_gpus": 16,
            "rollout_num_gpus_per_engine": 16,
        },
    },
}


@pytest.mark.parametrize("why", OUT_OF_REACH)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B"])
def test_engines_out_of_reach_are_refused_though_the_package_is_there(
    package: Package, tmp_path: Path, why: str, name: str
) -> None:
    s = llama(model__name=name, **OUT_OF_REACH[why])
    with pytest.raises(CostModelError) as refused:
        costs_of(s)
    assert "analytic" in refused.value.nearest and "pip install" not in refused.value.nearest
    assert package.compiled == []
    faults = list(table_knows_engine(_context(s, tmp_path)))
    assert faults and all("type: analytic" in f.nearest and "pip install" not in f.nearest for f in faults)


@pytest.mark.usefixtures("no_package")
def test_the_rule_and_the_cost_model_agree_on_what_the_package_could_do(tmp_path: Path) -> None:
    for gpu in ("A100", "H100", "H200", "B200", "H20"):
        for precision in ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8", "int4"):
            s = llama(cluster__gpu=gpu, rollout__engine={"weight_precision": precision})
            (fault,) = table_knows_engine(_context(s, tmp_path))
            with pytest.raises(CostModelError) as refused:
                costs_of(s)
            assert ("pip install" in fault.nearest) == ("pip install" in refused.value.nearest), (gpu, precision)


def test_nothing_to_be_had_is_refused_with_the_reason(package: Package, tmp_path: Path) -> None:
    package.lacks = lambda *_: True
    with pytest.raises(CostModelError) as refused:
        costs_of(llama())
    assert "has no Llama-3.1-8B in bf16 with bf16 KV on H100, TP 1" in refused.value.message
    assert "aiconfigurator-core 0.12.0 has none either (no kernel of 16 tokens)" in refused.value.message
    assert refused.value.nearest.endswith("`engine_costs: {type: analytic}`")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_too_little_to_interpolate_between_is_refused(package: Package, tmp_path: Path, phase: str) -> None:
    package.lacks = lambda asked, batch, tokens: asked == phase and tokens > 512
    with pytest.raises(CostModelError, match=r"too few to interpolate between.*nearest: .*type: analytic"):
        costs_of(llama())
    assert not (tmp_path / "cache").exists()


def test_what_the_package_refuses_is_refused_in_its_words(package: Package) -> None:
    package.refuses = "the quant mode needs fp8_tc_flops, which this system does not define"
    with pytest.raises(CostModelError, match=r"refuses it \(the quant mode needs fp8_tc_flops.*nearest: .*analytic"):
        costs_of(llama())


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_run_with_a_tabulated_engine_is_marked_measured(package: Package, tmp_path: Path) -> None:
    first = simulate(llama(), tmp_path, tmp_path / "first")
    second = simulate(llama(), tmp_path, tmp_path / "second")
    assert first.summary.kinds["engine_step"] == "measured"
    assert first.summary.finish_reason == second.summary.finish_reason != ""
    assert first.summary.step_time_mean_s == second.summary.step_time_mean_s > 0
    assert len(package.compiled) == 1


def test_the_command_line_says_it_in_one_message(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package.lacks = lambda *_: True
    written = tree(**{"model__name": "Llama-3.1-8B", "simulation__engine_costs": {"type": "measured"}})
    (tmp_path / "llama.yaml").write_text(yaml.safe_dump(written))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "llama.yaml"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "aiconfigurator-core 0.12.0 has none either" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/journal*"))
