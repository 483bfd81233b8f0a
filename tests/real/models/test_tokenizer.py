"""The character tokenizer: lossless on its alphabet, and the same as the file it writes."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.errors import RealError
from real.models.tokenizer import SPECIAL, CharTokenizer, FileTokenizer, load_tokenizer

pytestmark = pytest.mark.backend("CORE")

PRINTABLE = "".join(chr(c) for c in range(32, 127)) + "\n"
TEXTS = st.lists(st.one_of(st.text(PRINTABLE), st.sampled_from(SPECIAL))).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    CharTokenizer().save(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": 128, "model_type": "llama"}))
    return path


@pytest.fixture(scope="module")
def from_file(folder: Path) -> FileTokenizer:
    return load_tokenizer(folder)


@given(TEXTS)
def test_text_comes_back(text: str) -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(text=TEXTS, ids=st.lists(st.integers(0, 127)))
def test_the_saved_file_is_the_same_tokenizer(from_file: FileTokenizer, text: str, ids: list[int]) -> None:
    tokenizer = CharTokenizer()
    assert from_file.encode(text) == tokenizer.encode(text)
    assert from_file.decode(ids) == tokenizer.decode(ids)
    assert (from_file.vocab_size, from_file.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id) == (128, 2)


def test_letters_are_their_ascii_codes_and_delimiters_are_one_id() -> None:
    tokenizer = CharTokenizer()
    assert tokenizer.encode(string.digits) == list(range(48, 58))
    assert tokenizer.encode("<tool>1</tool><obs>2</obs>") == [3, 49, 4, 5, 50, 6]
    assert tokenizer.encode("é") == [tokenizer.unk_id]
    assert len(set(tokenizer.pieces)) == 128


def test_transformers_loads_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    text = "3+5=\n<tool>1 + 1</tool>"
    assert loaded(text, add_special_tokens=False)["input_ids"] == CharTokenizer().encode(text)
    assert loaded.decode(CharTokenizer().encode(text)) == text
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (2, 0, 1)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RealError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RealError, match="names no eos_token_id"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 3]}')
    with pytest.raises(RealError, match="is no tokenizer"):
        load_tokenizer(tmp_path)
