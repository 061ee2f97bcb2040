"""Names of batch keys, the component base class, prompts and their templates, tokenizers, and the resumable loader."""

from dapo_components.data.chat import PROMPT_TEMPLATES, PromptTemplate, get_template
from dapo_components.data.component import Component, read_key
from dapo_components.data.keys import BATCH_KEYS, Key, KeySpec
from dapo_components.data.loader import PromptLoader
from dapo_components.data.prompts import Prompt, PromptDataset, PromptSource
from dapo_components.data.tokenizer import load_tokenizer, stop_token_ids

__all__ = [
    "BATCH_KEYS",
    "PROMPT_TEMPLATES",
    "Component",
    "Key",
    "KeySpec",
    "Prompt",
    "PromptDataset",
    "PromptLoader",
    "PromptSource",
    "PromptTemplate",
    "get_template",
    "load_tokenizer",
    "read_key",
    "stop_token_ids",
]
