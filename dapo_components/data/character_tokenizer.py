"""A tokenizer with one token per character, written as the JSON file that ``tokenizers`` reads.

The folder it writes is an ordinary Hugging Face tokenizer: transformers and vLLM load it, and so does
:class:`CharacterTokenizer`, which has the names torchtune's recipes expect.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"
SPECIAL_TOKENS = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN)
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation
VOCABULARY: dict[str, int] = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}


def write_character_tokenizer(folder: str | Path, *, model_max_length: int = 1024) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``.

    Each printable ASCII character and the newline is one token; anything else becomes ``<unk>``. No token is added
    in front or behind: text and its tokens have the same length.

    Args:
        folder: Where to write; created if missing.
        model_max_length: Longest sequence of the model, in tokens, recorded for the tokenizer's users.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_character_tokenizer(folder)
        ...     CharacterTokenizer(folder).encode("1+1", add_eos=True)
        [6, 77, 6, 1]
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {"pad_token": PAD_TOKEN, "eos_token": EOS_TOKEN, "unk_token": UNK_TOKEN}
    _write_json(folder / "tokenizer.json", _tokenizer_json())
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model_max_length,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **names,
        },
    )


class CharacterTokenizer:
    """The tokenizer of a folder, with the methods that torchtune's recipes and data sets call.

    Args:
        folder: Holds ``tokenizer.json`` as :func:`write_character_tokenizer` writes it.

    Raises:
        ValueError: If the folder has no ``tokenizer.json`` or it lacks one of our special tokens.
    """

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"folder must hold a tokenizer.json, got {folder!r}; write one with build_tiny(folder)")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.pad_id = self._special(PAD_TOKEN)
        self.eos_id = self._special(EOS_TOKEN)
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the ids of ``text``.

        Args:
            text: Any text.
            add_bos: Must be False: the tokenizer has no start token.
            add_eos: Whether to append ``<eos>``.

        Raises:
            ValueError: If a start token is asked for.
        """
        if add_bos:
            raise ValueError("add_bos must be False: this tokenizer has no start token")
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*tokens, self.eos_id] if add_eos else tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _special(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer.json must define {token!r}; write it with write_character_tokenizer(folder)")
        return token_id


def _tokenizer_json() -> dict[str, Any]:
    added = [
        {"id": VOCABULARY[token], "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in SPECIAL_TOKENS
    ]
    # `Fuse` joins the tokens of a decoded text; without it they would be separated by spaces.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": UNK_TOKEN},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
