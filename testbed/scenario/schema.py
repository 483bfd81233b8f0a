"""JSON Schema of scenario, study and stages files, with docstrings as descriptions: for editors and `testbed schema`.

The schema says what a file may hold. It refuses to say which combinations work: that is `testbed.scenario.rules`.
"""

from __future__ import annotations

from typing import Any

from testbed.scenario.base import Section
from testbed.scenario.scenario import Scenario
from testbed.scenario.stages import StagesFile
from testbed.scenario.study import StudyFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> dict[str, Any]:
    """Schema of one scenario file."""
    return {"$schema": DIALECT, **_with_tags(Scenario.model_json_schema())}


def study_schema() -> dict[str, Any]:
    """Schema of one study file; the base is a scenario whose sections may be left to the variants."""
    return _with_base(StudyFile)


def stages_schema() -> dict[str, Any]:
    """Schema of one file of stages; the base likewise."""
    return _with_base(StagesFile)


def _with_base(model: type[Section]) -> dict[str, Any]:
    whole = model.model_json_schema()
    scenario = _with_tags(Scenario.model_json_schema())
    parts = scenario.pop("$defs")
    scenario.pop("required")
    whole["properties"]["base"]["anyOf"] = [{"$ref": "#/$defs/Scenario"}, {"type": "string"}]
    whole["$defs"] = {**whole.get("$defs", {}), **parts, "Scenario": scenario}
    return {"$schema": DIALECT, **whole}


def _with_tags(schema: dict[str, Any]) -> dict[str, Any]:
    """Members of a union must name their `type` (or `mode`): their default is for code, not for files."""
    for part in schema["$defs"].values():
        for tag in ("type", "mode"):
            if "const" in part.get("properties", {}).get(tag, {}):
                part["required"] = [tag, *part.get("required", ())]
    return schema
