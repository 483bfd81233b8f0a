"""The model that is trained and served: a preset name, a `config.json`, or the numbers themselves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import PositiveInt, Section

Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4", "int8", "int4"]


class PresetModel(Section):
    """A model of the bundled catalogue (`testbed doctor` lists the names)."""

    type: Literal["preset"] = "preset"
    name: str


class ConfigJsonModel(Section):
    """A Hugging Face `config.json`; the path is relative to the scenario file."""

    type: Literal["config_json"] = "config_json"
    path: str
    name: str | None = None


class InlineModel(Section):
    """Architecture numbers written out, in the names of a Hugging Face config."""

    type: Literal["inline"] = "inline"
    name: str = "inline"
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    num_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None


ModelConfig = Annotated[PresetModel | ConfigJsonModel | InlineModel, Field(discriminator="type")]
