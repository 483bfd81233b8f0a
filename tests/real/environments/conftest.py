"""What the environment tests share."""

from __future__ import annotations

import pytest

from real.models.tokenizer import CharTokenizer


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()
