import torch

from dapo_components.data.keys import BATCH_KEYS
from dapo_components.losses import DAPOLoss


def test_every_key_says_its_shape_its_meaning_and_its_writer():
    for name, spec in BATCH_KEYS.items():
        assert spec.shape.startswith("[B, G"), name
        assert isinstance(spec.dtype, torch.dtype), name
        assert spec.meaning, name
        assert spec.written_by, name


def test_masks_are_boolean_and_ids_are_integers():
    assert {spec.dtype for name, spec in BATCH_KEYS.items() if name.endswith("_mask")} == {torch.bool}
    assert {spec.dtype for name, spec in BATCH_KEYS.items() if name.endswith(("_id", "_tokens", "_length"))} == {
        torch.int64
    }


def test_the_loss_reads_documented_keys_by_default():
    loss = DAPOLoss(kl_coef=0.1, entropy_coef=0.1, rollout_correction={"level": "token"})
    assert set(loss.in_keys) | set(loss.measured_keys.values()) <= set(BATCH_KEYS)
