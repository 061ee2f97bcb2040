"""A real fast tokenizer of one token per character, with and without BOS and chat template."""

from __future__ import annotations

import string

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY = {
    token: index for index, token in enumerate([*SPECIAL, *("\n " + string.printable[:94])])
}  # "0" is 9, "1" is 10, ...
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(*, single: str | None = None, chat: bool = False):
    """Build a tokenizer; ``single`` is the form of an encoded text, for example ``"<s> $A </s>"``."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    if single:
        specials = [("<s>", VOCABULARY["<s>"]), ("</s>", VOCABULARY["</s>"])]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=specials)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """No token added, no chat template."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer():
    """Adds <s> in front."""
    return make_tokenizer(single="<s> $A")


@pytest.fixture(scope="session")
def bos_eos_tokenizer():
    """Adds <s> in front and </s> at the end."""
    return make_tokenizer(single="<s> $A </s>")


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Adds <s> in front and </s> at the end; its chat template writes <s> too."""
    return make_tokenizer(single="<s> $A </s>", chat=True)
