"""What every section of a scenario shares: frozen, closed models whose fields carry their unit in name or docstring.

Knows pydantic and nothing else. It refuses to know files, command lines and what a section means.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all configuration models: unknown keys are errors, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)
