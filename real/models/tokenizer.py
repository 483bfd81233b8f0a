"""Text to token ids and back: our character tokenizer, and any `tokenizer.json`.

Only environments use text (to pose a task, to read an answer); what engines and trainer exchange is ids. Refuses to
know models and templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from real.errors import RealError


class Tokenizer(Protocol):
    """`vocab_size` is one more than the largest id, so ids of any text are in [0, vocab_size)."""

    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


SPECIAL = ("<pad>", "<bos>", "<eos>", "<tool>", "</tool>", "<obs>", "</obs>", "<unk>")
"""Ids 0 to 7, where ASCII has control characters that no text here needs."""


def _piece(token_id: int) -> str:
    if token_id < len(SPECIAL):
        return SPECIAL[token_id]
    return chr(token_id) if token_id == ord("\n") or 32 <= token_id < 127 else f"<0x{token_id:02X}>"


class CharTokenizer:
    """128 ids: printable ASCII and newline at their code, special tokens below; any other character is `<unk>`.

    `decode(encode(text)) == text` for text of printable ASCII and newlines. The reverse need not hold: the six ids of
    a spelled-out `<tool>` come back as one id, which is why ids are never rebuilt from text."""

    pad_id, bos_id, eos_id, tool_id, tool_end_id, obs_id, obs_end_id, unk_id = range(8)
    vocab_size = 128
    pieces = tuple(_piece(i) for i in range(128))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            special = next((i for i, s in enumerate(SPECIAL) if text.startswith(s, at)), None)
            if special is not None:
                ids.append(special)
                at += len(SPECIAL[special])
            else:
                code = ord(text[at])
                ids.append(code if code == 10 or 32 <= code < 127 else self.unk_id)
                at += 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and what transformers' AutoTokenizer wants beside it."""
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        fast = Fast(models.WordLevel({piece: i for i, piece in enumerate(self.pieces)}, unk_token=SPECIAL[self.unk_id]))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
        fast.save(str(folder / "tokenizer.json"))
        named = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False)) | {"unk_token": "<unk>"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package alone. No token is added in front of or behind a text."""

    def __init__(self, file: Path, eos_id: int) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(file))
        self.eos_id = eos_id
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(folder: Path) -> FileTokenizer:
    """The tokenizer of a model folder; its end token is the model's (`eos_token_id` of config.json; the first if there
    are several). Raises RealError if there is none or it cannot be read."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise RealError(
            f"{folder} has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r}) "
            "writes one"
        )
    eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    if eos is None:
        raise RealError(f"{folder / 'config.json'} names no eos_token_id, so no reply would ever end")
    try:
        return FileTokenizer(file, eos)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise RealError(f"{file} is no tokenizer: {error}") from None
