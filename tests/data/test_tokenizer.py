from __future__ import annotations

import pytest

from dapo_components.data.tokenizer import bos_id, eos_id, load_tokenizer, stop_token_ids


def test_a_saved_tokenizer_comes_back(tmp_path, chat_tokenizer):
    chat_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("1+1")["input_ids"] == chat_tokenizer("1+1")["input_ids"] == [1, 10, 81, 10, 2]
    assert loaded.chat_template == chat_tokenizer.chat_template
    assert (bos_id(loaded), eos_id(loaded)) == (1, 2)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_tokenizer_json_alone_is_enough(tmp_path, bos_tokenizer, name):
    bos_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / name)
    assert loaded("1")["input_ids"] == [1, 10]
    assert eos_id(loaded) is None


def test_a_missing_folder_is_named_with_its_nearest_sibling(tmp_path):
    (tmp_path / "qwen-tokenizer").mkdir()
    with pytest.raises(ValueError, match=r"qwen-tokeniser' does not exist.*did you mean 'qwen-tokenizer'"):
        load_tokenizer(tmp_path / "qwen-tokeniser")


def test_a_relative_path_below_an_existing_folder_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="tokenizer folder 'models/tiny' does not exist"):
        load_tokenizer("models/tiny")


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"must hold a tokenizer .*it holds model\.safetensors"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_gets_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"no tokenizer .* \(in this folder\): [^\n]+$"):
        load_tokenizer(tmp_path)


def test_a_hub_name_that_cannot_be_had_gets_one_line():
    with pytest.raises(
        ValueError, match=r"'someone/no-such-model' \(neither a folder here nor available from the hub\)"
    ):
        load_tokenizer("someone/no-such-model")  # conftest keeps the suite offline


def test_stop_ids_are_the_eos_and_then_the_others_each_once(tokenizer):
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, ["<|user|>", 2, 4, "</s>", 0]) == (2, 4, 0)


@pytest.mark.parametrize("token", ["<|end|>", 10_000, -1, True])
def test_unknown_stop_tokens_are_refused(tokenizer, token):
    with pytest.raises(ValueError, match="must be in the tokenizer's vocabulary of 103 tokens"):
        stop_token_ids(tokenizer, [token])


def test_without_any_stop_token_nothing_would_end(tmp_path, tokenizer):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    bare = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no EOS token and no stop tokens"):
        stop_token_ids(bare)
    assert stop_token_ids(bare, ["</s>"]) == (2,)
