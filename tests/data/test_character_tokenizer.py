from __future__ import annotations

import json

import pytest

from dapo_components.data.character_tokenizer import (
    CHARACTERS,
    VOCABULARY,
    CharacterTokenizer,
    write_character_tokenizer,
)
from dapo_components.data.tokenizer import load_tokenizer, stop_token_ids

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(path, model_max_length=77)
    return str(path)


@pytest.fixture(scope="module")
def hugging_face(folder):
    pytest.importorskip("transformers")
    return load_tokenizer(folder)


def test_vocabulary_is_three_specials_a_newline_and_printable_ascii():
    assert len(VOCABULARY) == 3 + 1 + 95
    assert sorted(VOCABULARY.values()) == list(range(99))
    assert set(CHARACTERS) == {"\n", *map(chr, range(32, 127))}


def test_ids_are_one_per_character(folder):
    # pad 0, eos 1, unk 2, newline 3, blank 4, "0" 5, "1" 6, ...
    assert CharacterTokenizer(folder).encode("0 9\n") == [5, 4, 14, 3]
    assert CharacterTokenizer(folder).encode("0 9\n", add_eos=True) == [5, 4, 14, 3, 1]


def test_transformers_reads_the_same_ids_and_adds_nothing(folder, hugging_face):
    assert hugging_face(CHARACTERS)["input_ids"] == CharacterTokenizer(folder).encode(CHARACTERS)
    assert hugging_face(CHARACTERS)["input_ids"] == list(range(3, 99))


def test_text_survives_the_round_trip(folder, hugging_face):
    ours = CharacterTokenizer(folder)
    assert ours.decode(ours.encode(CHARACTERS)) == CHARACTERS
    assert hugging_face.decode(hugging_face(CHARACTERS)["input_ids"]) == CHARACTERS


def test_special_tokens_are_known_to_transformers(hugging_face):
    assert (hugging_face.pad_token_id, hugging_face.eos_token_id, hugging_face.unk_token_id) == (0, 1, 2)
    assert hugging_face.bos_token_id is None
    assert hugging_face.model_max_length == 77
    assert stop_token_ids(hugging_face) == (1,)


def test_special_tokens_can_be_kept_or_dropped_in_text(folder, hugging_face):
    assert CharacterTokenizer(folder).decode([6, 1, 0]) == "1"
    assert CharacterTokenizer(folder).decode([6, 1, 0], skip_special_tokens=False) == "1<eos><pad>"
    assert hugging_face.decode([6, 1, 0], skip_special_tokens=True) == "1"


def test_other_characters_are_unknown(folder, hugging_face):
    assert CharacterTokenizer(folder).encode("1é2") == [6, 2, 7]
    assert hugging_face("1é2")["input_ids"] == [6, 2, 7]


def test_torchtune_reads_pad_and_end_ids(folder):
    tokenizer = CharacterTokenizer(folder)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 99)


def test_a_start_token_is_refused(folder):
    with pytest.raises(ValueError, match="add_bos must be False"):
        CharacterTokenizer(folder).encode("1", add_bos=True)


def test_a_folder_without_tokenizer_says_how_to_write_one(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json.*build_tiny"):
        CharacterTokenizer(str(tmp_path))


def test_another_tokenizer_is_refused(folder, tmp_path):
    with open(f"{folder}/tokenizer.json", encoding="utf-8") as file:
        content = json.load(file)
    content["added_tokens"] = []
    del content["model"]["vocab"]["<eos>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="must define '<eos>'"):
        CharacterTokenizer(str(tmp_path))
