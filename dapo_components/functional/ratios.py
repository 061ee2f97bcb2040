"""Log importance ratios, masked and bounded before anything takes their exponential.

Shapes: ``...`` any leading dimensions, ``T`` response positions. A masked position has log-ratio 0 (ratio 1) and gets
a gradient of exactly 0, whatever lies there.
"""

from __future__ import annotations

from torch import Tensor

from dapo_components.functional.reductions import check_mask, masked_mean, masked_sum, zero_masked


def token_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, *, clamp: float | None = 20.0) -> Tensor:
    r"""Log importance ratio per token, :math:`d_t = \log\pi_\theta(y_t) - \log\pi_{old}(y_t)`.

    Args:
        log_prob: Log-probs under the policy being trained, ``[..., T]``.
        old_log_prob: Log-probs before the update, ``[..., T]``; never receives a gradient.
        mask: Boolean, ``[..., T]``.
        clamp: Bound on :math:`|d_t|` in nats; the gradient is 0 beyond it. None leaves the ratio as it is. At 20 it
            concerns broken inputs only.

    Returns:
        Log-ratio ``[..., T]``, 0 where ``mask`` is False.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If the shapes differ or ``clamp`` is not positive.

    Example:
        >>> import torch
        >>> log_prob, old = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-1.5, -2.0, float("nan")])
        >>> token_log_ratio(log_prob, old, torch.tensor([True, True, False]))
        tensor([0.5000, 0.0000, 0.0000])
    """
    _check_inputs(log_prob, old_log_prob, mask, clamp)
    log_ratio = zero_masked(log_prob - old_log_prob.detach(), mask)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


def sequence_log_ratio(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mask: Tensor,
    *,
    length_normalized: bool = True,
    clamp: float | None = 20.0,
) -> Tensor:
    r"""Log importance ratio per sequence.

    :math:`\frac{1}{n}\sum_t d_t` over the :math:`n` valid tokens (the geometric mean of GSPO, arXiv:2507.18071), or
    :math:`\sum_t d_t`, the ratio of the sequences' probabilities. The bound applies to the result, not to its terms.

    Args:
        log_prob: Log-probs under the policy being trained, ``[..., T]``.
        old_log_prob: Log-probs before the update, ``[..., T]``; never receives a gradient.
        mask: Boolean, ``[..., T]``.
        length_normalized: Mean over tokens instead of their sum.
        clamp: Bound on the absolute value in nats, with gradient 0 beyond it; None leaves the ratio as it is.

    Returns:
        Log-ratio ``[...]``, 0 for a row without a valid token.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If the shapes differ or ``clamp`` is not positive.

    Example:
        >>> import torch
        >>> log_prob, old = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -3.5, 0.0]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> sequence_log_ratio(log_prob, old, mask), sequence_log_ratio(log_prob, old, mask, length_normalized=False)
        (tensor([1.]), tensor([2.]))
    """
    _check_inputs(log_prob, old_log_prob, mask, clamp)
    reduce = masked_mean if length_normalized else masked_sum
    log_ratio = reduce(log_prob - old_log_prob.detach(), mask, dim=-1)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


def _check_inputs(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, clamp: float | None) -> None:
    check_mask(mask)
    if not log_prob.shape == old_log_prob.shape == mask.shape:
        raise ValueError(
            "log_prob, old_log_prob and mask must have one shape, got "
            f"{tuple(log_prob.shape)}, {tuple(old_log_prob.shape)} and {tuple(mask.shape)}"
        )
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp must be > 0 or None, got {clamp}")
