import pytest
import torch

from dapo_components.generation.weights import WeightUpdateError, canonical_name, copy_parameters
from tests.helpers import TINY_MODELS, plain_logits, tiny_huggingface, tiny_torchtune


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)
@pytest.mark.parametrize("listing", ["named_parameters", "state_dict"])
def test_all_parameters_are_copied_by_name(build, tied, listing):
    source, target = build(1, tied=tied), build(2, tied=tied)
    named = source.named_parameters() if listing == "named_parameters" else source.state_dict().items()
    assert copy_parameters(target, named) > 10
    assert torch.equal(plain_logits(target, [1, 2, 3]), plain_logits(source, [1, 2, 3]))
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert copy_parameters(target, source.named_parameters()) > 10, "equal values in other memory are copied"


def test_the_models_own_tensors_are_skipped():
    model = tiny_torchtune()
    assert copy_parameters(model, model.named_parameters()) == 0
    assert copy_parameters(model, ((name, tensor.detach()) for name, tensor in model.named_parameters())) == 0


def test_wrapper_prefixes_are_ignored():
    source, target = tiny_torchtune(1), tiny_torchtune(2)
    wrapped = ((f"_orig_mod.{name.replace('.attn', '._checkpoint_wrapped_module.attn')}", tensor)
               for name, tensor in source.named_parameters())  # fmt: skip
    copy_parameters(target, wrapped)
    assert torch.equal(plain_logits(target, [1]), plain_logits(source, [1]))
    assert canonical_name("_orig_mod.norm.scale") == "norm.scale"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda named: [("wrong.weight", torch.zeros(2)), *named], "the model has no parameter 'wrong.weight'"),
        (lambda named: [(named[0][0], torch.zeros(3)), *named[1:]], "has shape [13, 16], got [3]"),
        (lambda named: [], "parameters of the model were not sent: tok_embeddings.weight"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_has_changed(change, text):
    source, target = tiny_torchtune(1), tiny_torchtune(2)
    before = plain_logits(target, [1, 2])
    with pytest.raises(WeightUpdateError) as raised:
        copy_parameters(target, change(list(source.named_parameters())))
    assert text in str(raised.value)
    assert "no parameter was changed" in str(raised.value)
    assert raised.value.num_copied == 0
    assert torch.equal(plain_logits(target, [1, 2]), before)


def test_missing_parameters_are_listed_and_the_mixture_is_admitted():
    source, target = tiny_huggingface(1), tiny_huggingface(2)
    named = [(name, tensor) for name, tensor in source.named_parameters() if "k_proj" not in name]
    with pytest.raises(WeightUpdateError) as raised:
        copy_parameters(target, named)
    assert "2 parameters of the model were not sent: model.layers.0.self_attn.k_proj.weight, " in str(raised.value)
    assert f"{len(named)} parameters were replaced already" in str(raised.value)
    assert raised.value.num_copied == len(named)


def test_sharded_tensors_are_refused():
    class Sharded(torch.Tensor):
        def full_tensor(self):
            return self

    target = tiny_torchtune()
    name, tensor = next(iter(tiny_torchtune(1).named_parameters()))
    sharded = tensor.detach().as_subclass(Sharded)
    with pytest.raises(WeightUpdateError, match=r"'tok_embeddings.weight' is sharded; send tensor.full_tensor\(\)"):
        copy_parameters(target, [(name, sharded)])
