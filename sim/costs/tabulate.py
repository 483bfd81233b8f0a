"""Step times of engines that the bundled table lacks: tabulated once with `aiconfigurator-core`, then kept as CSV.

The optional package (`pip install 'rl-testbed[tables]'`) computes step latencies from kernel tables measured on the
GPU. It is asked on the grid of the bundled file, 121 points in one or two seconds, and its answers lie in the user's
cache folder in the columns of that file. This module refuses to know how rows become step times
(`sim.costs.measured`), to import the package before it is needed, and to ask a model hub: a model is described to the
package by a `config.json` of its own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sim.costs.errors import CostModelError
from sim.costs.measured import can_fit_pairs
from sim.costs.tables import StepTable, find_table, read_tables, step_tables
from testbed.scenario.catalogue import ModelSpec

PACKAGE, MODULE = "aiconfigurator-core", "aiconfigurator_core"
INSTALL = "pip install 'rl-testbed[tables]'"

SYSTEMS = {
    "A100": ("a100_sxm", "0.5.10"),
    "H100": ("h100_sxm", "0.5.14"),
    "H200": ("h200_sxm", "0.5.14"),
    "B200": ("b200_sxm", "0.5.14"),
}
"""GPU -> (its name in the package, version of SGLang whose kernels were measured on it)."""

MOST_GPUS = 8
"""Tables of collectives end at 8 GPUs; what the package says of larger groups is scaled, not measured."""

WEIGHT_MODES = {"bf16": "bfloat16", "fp8": "fp8_block"}
"""Weight precision -> quantisation in the package's words; fp8 has a scale for every 128 x 128 weights."""

MLA_SIZES = (192, 512, 64, 128)
"""Query-key width, KV rank, rope part, value width of the MLA kernels that the package has (DeepSeek-V3's)."""

FEWEST = 5
"""A table needs this many batch sizes, contexts and lengths of single prompts (the grid has 10, 9 and 11)."""

COLUMNS = (
    "system",
    "backend",
    "backend_version",
    "model",
    "tp_size",
    "moe_ep_size",
    "phase",
    "batch_size",
    "context_tokens",
    "latency_ms",
)


class EngineKind(Struct, frozen=True):
    """What a table is of. In an MoE model the experts are spread over the engine's GPUs: EP = TP."""

    model: ModelSpec
    gpu: str
    tensor_parallel: int
    precision: str

    @property
    def expert_parallel(self) -> int | None:
        """Null for a dense model."""
        return self.tensor_parallel if self.model.is_moe else None


def table_for(model: ModelSpec, gpu: str, tensor_parallel: int, precision: str, kv_dtype: str) -> StepTable:
    """The bundled table of this engine kind, else the cached one, else a new one.

    Raises `CostModelError` if there is none: the package is not installed, or it has no numbers either.
    """
    try:
        return find_table(model, gpu, tensor_parallel, precision, kv_dtype)
    except CostModelError as error:
        lacking = error
    if gpu not in SYSTEMS or tensor_parallel > MOST_GPUS or precision not in WEIGHT_MODES or kv_dtype != "bf16":
        raise lacking
    if find_spec(MODULE) is None:
        raise CostModelError(lacking.message, f"{lacking.nearest}; or `{INSTALL}`")
    kind = EngineKind(model, gpu, tensor_parallel, precision)
    path = cache_path(kind)
    with suppress(OSError, ValueError, KeyError, TypeError, csv.Error):  # no such file, or not a whole one
        return table_of(path.read_text("utf-8"))
    try:
        text = tabulate(kind)
        table = table_of(text)
    except CostModelError as error:
        raise CostModelError(f"{lacking.message}, and {error.message}", lacking.nearest) from error
    _keep(path, text)
    return table


# --- asking the package -----------------------------------------------------------------------------------------------


def tabulate(kind: EngineKind) -> str:
    """CSV text with the package's answers on the grid of the bundled file; points that it has no data for are left
    out.

    Raises `CostModelError` if it can't be imported or answers nothing for this engine kind.
    """
    config = hugging_face_config(kind.model)
    grid = next(iter(step_tables().values()))
    reason = ""
    rows: list[tuple[str, int, int, str]] = []
    with _quiet():
        try:
            from aiconfigurator_core.sdk.engine import EngineHandle
            from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError
        except (ImportError, OSError) as e:
            raise CostModelError(f"{PACKAGE} is installed but can't be imported ({_first_line(e)})") from e
        try:
            engine = _compile(EngineHandle, kind, config)
            for phase, batch, tokens in _points(grid):
                try:
                    if phase == "prefill":
                        milliseconds = engine.predict_prefill_latency(batch, tokens, 0)
                    else:
                        milliseconds = engine.decode_step_latency(batch, tokens, 2)
                except PerfDataNotAvailableError as e:
                    reason = reason or _first_line(e)
                    continue
                rounded = f"{milliseconds:.4f}"  # as in the bundled file
                if 0 < float(rounded) < inf:
                    rows.append((phase, batch, tokens, rounded))
        except (ValueError, RuntimeError, KeyError) as e:
            raise CostModelError(f"{_package()} refuses it ({_first_line(e)})") from e
    if not rows:
        raise CostModelError(f"{_package()} has none either ({reason or 'no step took time'})")
    system, sglang = SYSTEMS[kind.gpu]
    split = (kind.tensor_parallel, kind.expert_parallel or "")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [COLUMNS, *((system, "sglang", sglang, kind.model.name, *split, *row) for row in rows)]
    )
    return text.getvalue()


def _points(grid: StepTable) -> list[tuple[str, int, int]]:
    """(phase, batch, tokens of each) of a table."""
    prefill = [("prefill", prompts, tokens) for prompts, tokens in grid.prefill]
    return prefill + [("decode_step", batch, context) for context, batch in grid.decode]


def _compile(engine_handle: Any, kind: EngineKind, config: dict[str, Any]) -> Any:
    """The package's engine of this kind; it has read the folder with the config when this returns."""
    system, sglang = SYSTEMS[kind.gpu]
    mode = WEIGHT_MODES[kind.precision]
    options: dict[str, Any] = {
        "backend_version": sglang,
        "tp_size": kind.tensor_parallel,
        "gemm_quant_mode": mode,
        "fmha_quant_mode": "bfloat16",
        "kvcache_quant_mode": "bfloat16",
    }
    if kind.expert_parallel is not None:
        options |= {"moe_tp_size": 1, "moe_ep_size": kind.expert_parallel, "moe_quant_mode": mode}
    with tempfile.TemporaryDirectory(prefix="rl-testbed-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        return engine_handle.compile(folder, system, "sglang", **options)


def hugging_face_config(model: ModelSpec) -> dict[str, Any]:
    """`config.json` of a model with these numbers, of an architecture that the package has.

    Raises `CostModelError` for a model that none of its architectures stands for (they don't read every number).
    """
    m = model
    config: dict[str, Any] = {
        "architectures": [_architecture(m)],
        "num_hidden_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "intermediate_size": m.intermediate,
        "vocab_size": m.vocab,
        "tie_word_embeddings": m.tied,
        "max_position_embeddings": 131_072,  # must be there; no step time depends on it
    }
    if m.is_moe:
        experts = "n_routed_experts" if m.is_mla else "num_experts"
        config |= {experts: m.experts, "num_experts_per_tok": m.topk, "moe_intermediate_size": m.moe_intermediate}
    if m.is_mla:
        config |= {
            "n_shared_experts": m.shared_experts,
            "first_k_dense_replace": m.dense_layers,
            "q_lora_rank": m.q_lora_rank,
            "kv_lora_rank": m.kv_lora_rank,
            "qk_nope_head_dim": m.head_dim - m.rope_head_dim,
            "qk_rope_head_dim": m.rope_head_dim,
            "v_head_dim": m.v_head_dim,
        }
    return config


def _architecture(m: ModelSpec) -> str:
    if m.is_mla:
        if (m.head_dim, m.kv_lora_rank, m.rope_head_dim, m.v_head_dim) != MLA_SIZES or m.shared_experts != 1:
            raise CostModelError(
                f"{PACKAGE} has latent attention only with DeepSeek-V3's head sizes and one shared expert"
            )
        return "DeepseekV3ForCausalLM"
    if m.is_moe:
        if m.shared_experts or m.dense_layers:
            raise CostModelError(f"{PACKAGE} has no mixture of experts with grouped-query attention and shared experts")
        return "Qwen3MoeForCausalLM"
    return "Qwen3ForCausalLM" if m.qk_norm else "Qwen2ForCausalLM" if m.attention_bias else "LlamaForCausalLM"


# --- a table to interpolate in ----------------------------------------------------------------------------------------


def table_of(text: str) -> StepTable:
    """The one table of a CSV text, cut to a grid without gaps.

    Raises `CostModelError` if too little is left (see `FEWEST`), `ValueError` or `KeyError` if the text is no table.
    """
    (table,) = read_tables(text.splitlines()).values()
    decode = whole_grid(table.decode)
    contexts, batches = {c for c, _ in decode}, {b for _, b in decode}
    lengths = {tokens for prompts, tokens in table.prefill if prompts == 1}
    if min(len(contexts), len(batches), len(lengths)) < FEWEST or not can_fit_pairs(table.prefill):
        had = f"{len(table.decode)} decode and {len(table.prefill)} prefill points"
        raise CostModelError(f"{_package()} has too little of it: {had}, which leave too few to interpolate between")
    return StepTable(table.expert_parallel, decode, table.prefill)


def whole_grid(decode: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Points (context, batch) without gaps: what lacks the largest share of its points goes, until nothing lacks
    any."""
    sides = [{context for context, _ in decode}, {batch for _, batch in decode}]
    while all(sides):
        points = [(c, b) for c in sides[0] for b in sides[1]]
        gaps = Counter((i, point[i]) for point in points if point not in decode for i in (0, 1))
        if not gaps:
            break
        i, value = max(gaps, key=lambda g: (gaps[g] / len(sides[1 - g[0]]), g[1]))
        sides[i].remove(value)
    return {(c, b): seconds for (c, b), seconds in decode.items() if c in sides[0] and b in sides[1]}


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rl-testbed/tables`, by default `~/.cache/rl-testbed/tables`."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification says
        base = Path(os.path.expanduser("~")) / ".cache"
    return base / "rl-testbed" / "tables"


def cache_path(kind: EngineKind) -> Path:
    """Key: version of the package, GPU with its SGLang, numbers of the model (not its name), TP, EP, precision."""
    system, sglang = SYSTEMS[kind.gpu]
    numbers = msgspec.json.encode(msgspec.structs.replace(kind.model, name=""))
    model = hashlib.sha256(numbers).hexdigest()[:12]
    split = f"tp{kind.tensor_parallel}-ep{kind.expert_parallel or 1}"
    return cache_folder() / f"{_version()}-{system}-sglang{sglang}-{model}-{split}-{kind.precision}.csv"


def _keep(path: Path, text: str) -> None:
    """Put the whole file there at once, for runs side by side. A folder that can't be written is no reason to stop."""
    if not path.is_absolute():  # nobody's home
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", encoding="utf-8", delete=False) as f:
            try:
                f.write(text)
                f.flush()
                os.replace(f.name, path)
            except OSError:
                os.unlink(f.name)
                raise


# --- the package as a package -----------------------------------------------------------------------------------------


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def _package() -> str:
    return f"{PACKAGE} {_version()}"


def _first_line(error: BaseException) -> str:
    """What an error says, short: its texts go on with lists of everything that was tried."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= 120 else f"{line[:117]}..."


@contextmanager
def _quiet() -> Iterator[None]:
    """The package warns of tables that no answer here comes from: keep that off the terminal."""
    logger = logging.getLogger(MODULE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
