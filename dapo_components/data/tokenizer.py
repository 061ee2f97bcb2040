"""Loading a tokenizer, and the ids that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_components.data.names import nearest_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a model folder, a ``tokenizer.json`` file, or by its name on the Hugging Face hub.

    Args:
        folder: Local folder or file, or a hub name such as ``"Qwen/Qwen2.5-0.5B"``.

    Raises:
        ValueError: If nothing is there, the folder holds no tokenizer, or the tokenizer is not a fast one.
        ImportError: If transformers is not installed.

    Example:
        >>> tokenizer = load_tokenizer("models/Qwen2.5-0.5B")  # doctest: +SKIP
    """
    transformers = _import_transformers()
    path = Path(folder).expanduser()
    if path.is_file():
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if not names.intersection(_TOKENIZER_FILES):
            shown = ", ".join(sorted(names)[:10]) or "nothing"
            raise ValueError(
                f"folder {str(folder)!r} must hold a tokenizer ({', '.join(_TOKENIZER_FILES[:2])}), it holds {shown}"
            )
        if "tokenizer.json" in names and not names.intersection({"tokenizer_config.json", "config.json"}):
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    elif not _is_hub_name(str(folder)):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(
            f"tokenizer folder {str(folder)!r} does not exist; "
            f"in {str(path.parent)!r} {nearest_name(path.name, siblings)}"
        )
    return _from_pretrained(transformers, str(folder), is_local=path.is_dir())


def stop_token_ids(tokenizer: PreTrainedTokenizerFast, extra: Sequence[int | str] = ()) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's EOS, then ``extra``, each once.

    Args:
        tokenizer: A fast tokenizer.
        extra: More stop tokens, as ids or as their text (``"<|im_end|>"``).

    Raises:
        ValueError: If one is not in the vocabulary, or if nothing ends a response.

    Example:
        >>> stop_token_ids(load_tokenizer("models/Qwen2.5-0.5B"), ["<|im_end|>"])  # doctest: +SKIP
        (151643, 151645)
    """
    eos = eos_id(tokenizer)
    ids = [] if eos is None else [eos]
    vocabulary = tokenizer.get_vocab()
    for token in extra:
        if isinstance(token, str) and token in vocabulary:
            ids.append(vocabulary[token])
        elif isinstance(token, int) and not isinstance(token, bool) and 0 <= token < len(tokenizer):
            ids.append(token)
        else:
            raise ValueError(
                f"stop token {token!r} must be in the tokenizer's vocabulary of {len(tokenizer)} tokens; "
                f"its special tokens are {tokenizer.all_special_tokens}"
            )
    if not ids:
        raise ValueError("the tokenizer has no EOS token and no stop tokens were given: name at least one")
    return tuple(dict.fromkeys(ids))


def bos_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id of the token that begins a text, ``None`` for a tokenizer without one."""
    return tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else None


def eos_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id of the token that ends a text, ``None`` for a tokenizer without one."""
    return tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("loading a tokenizer needs transformers: pip install 'dapo-components[recipes]'") from error
    return transformers


def _is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` or ``name`` rather than that of a path."""
    if name[:1] in ("", ".", "/", "~") or name.count("/") > 1 or name.endswith((".json", "/")):
        return False
    owner = name.partition("/")[0] if "/" in name else ""
    return not (owner and Path(owner).is_dir())  # "models/tiny" beside an existing folder "models" is a path


def _from_pretrained(transformers: Any, name: str, *, is_local: bool) -> PreTrainedTokenizerFast:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    # The hub client raises many types, with pages of advice; the first line says what happened.
    except Exception as error:
        where = "in this folder" if is_local else "neither a folder here nor available from the hub"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"no tokenizer {name!r} ({where}): {reason}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {name!r} must be a fast one (tokenizer.json), got {type(tokenizer).__name__}")
    return tokenizer
