from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dapo_components.data.character_tokenizer import CharacterTokenizer
from dapo_components.data.demonstrations import AdditionDemonstrations
from dapo_components.tiny_model import TinyArchitecture, build_tiny

pytest.importorskip("safetensors")
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny") / "initial", seed=0)


@pytest.fixture(scope="module")
def hugging_face(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def torchtune_model(folder, tmp_path_factory):
    """The model that the configs name, loaded by the checkpointer that they name."""
    training = pytest.importorskip("torchtune.training")
    from torchtune.models.llama3_2 import llama3_2

    checkpointer = training.FullModelHFCheckpointer(
        checkpoint_dir=str(folder),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3_2",
        output_dir=str(tmp_path_factory.mktemp("out")),
    )
    model = llama3_2(**config_model("tiny_cpu_sft.yaml"))
    model.load_state_dict(checkpointer.load_checkpoint()["model"])
    return model.eval()


def config_model(name):
    omegaconf = pytest.importorskip("omegaconf")
    model = dict(omegaconf.OmegaConf.load(REPOSITORY / "recipes" / "configs" / name).model)
    assert model.pop("_component_") == "torchtune.models.llama3_2.llama3_2"
    return model


@pytest.mark.parametrize("name", ["tiny_cpu_sft.yaml", "tiny_cpu.yaml"])
def test_configs_name_the_default_architecture(name):
    expected = vars(TinyArchitecture()) | {"num_kv_heads": TinyArchitecture().num_heads, "scale_factor": 1}
    del expected["norm_eps"]  # the builder's default is the same, 1e-5
    assert config_model(name) == expected


def test_it_has_about_a_million_parameters(hugging_face):
    # Embedding 99 x 160, which is the head too; per layer 4 x 160 x 160 + 3 x 160 x 448 + 2 norms; one last norm.
    assert (
        sum(parameter.numel() for parameter in hugging_face.parameters())
        == 15_840 + 3 * (102_400 + 215_040 + 320) + 160
    )


def test_transformers_and_torchtune_agree(hugging_face, torchtune_model):
    tokens = torch.randint(0, 99, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = hugging_face(tokens).logits, torchtune_model(tokens)
    assert expected.std() > 0.5  # logits that all vanish would agree whatever the weights
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_head_is_the_embedding(hugging_face, torchtune_model):
    assert hugging_face.lm_head.weight is hugging_face.model.embed_tokens.weight
    assert "output.weight" not in torchtune_model.state_dict()


def test_an_untrained_model_is_nearly_indifferent(hugging_face):
    tokens = torch.randint(3, 99, (8, 64), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = F.cross_entropy(hugging_face(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    # Logits of unit variance cost 0.5 above the log of the vocabulary's size.
    assert loss.item() == pytest.approx(math.log(99) + 0.5, abs=0.2)


def test_packed_demonstrations_do_not_see_each_other(folder, torchtune_model):
    collate = pytest.importorskip("torchtune.data").padded_collate_packed
    rows = AdditionDemonstrations(CharacterTokenizer(str(folder)), num_demonstrations=20, seed=0, row_length=128)
    batch = collate([rows[0], rows[1]])
    with torch.no_grad():
        packed = torchtune_model(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"])[1]
        lengths = rows[1]["seq_lens"].tolist()
        alone = [torchtune_model(part[None])[0] for part in rows[1]["tokens"].split(lengths)]
    assert len(lengths) >= 3
    for together, apart in list(zip(packed.split(lengths), alone, strict=True))[:-1]:  # the last part may be padding
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)


def test_seed_decides_the_weights(folder, tmp_path):
    same = build_tiny(tmp_path / "same", seed=0) / "model.safetensors"
    other = build_tiny(tmp_path / "other", seed=1) / "model.safetensors"
    assert same.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert other.read_bytes() != same.read_bytes()


def test_the_folder_says_how_generation_ends(folder):
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text("utf-8"))
        assert (content["eos_token_id"], content["pad_token_id"], content["bos_token_id"]) == (1, 0, None)


def test_other_sizes(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = TinyArchitecture(vocab_size=120, num_layers=1, num_heads=2, embed_dim=32, intermediate_dim=48)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        build_tiny(tmp_path / "small", seed=0, architecture=sizes)
    )
    # 120 x 32, then 4 x 32 x 32 + 3 x 32 x 48 + 2 x 32, then 32
    assert sum(parameter.numel() for parameter in model.parameters()) == 3840 + 4096 + 4608 + 64 + 32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be >= 1, got 0"),
        ({"embed_dim": 155}, r"embed_dim must be a multiple of 2 \* num_heads = 10 .*got 155"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        TinyArchitecture(**sizes)
