"""Log-probs and entropies from logits and from hidden states."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_components.functional import aggregate, linear_log_probs, token_entropy, token_log_probs
from tests import oracles
from tests.oracles_policy import grad_of

NAN, INF = float("nan"), float("inf")


def problem(generator, rows=7, width=5, vocabulary=11, dtype=torch.float64):
    """Hidden states, weight, bias and tokens; more rows and columns than the tiles of the tests have."""
    hidden = torch.randn(rows, width, dtype=dtype, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=dtype, generator=generator)
    bias = torch.randn(vocabulary, dtype=dtype, generator=generator)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), tokens


def plain(logits, tokens, temperature=1.0):
    """The route that everyone writes: log_softmax, gather."""
    log_probs = (logits / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def total(results):
    """Something to differentiate that depends on all results in a way that is not linear."""
    return torch.cat([(x + 1).square() for x in results]).sum()


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few elements, so that small problems have many."""
    for module in ("logits_log_probs", "head_log_probs"):
        monkeypatch.setattr(f"dapo_components.functional.{module}.tile_elements", lambda device: 12)
    monkeypatch.setattr("dapo_components.functional.head_log_probs._NARROWEST", 2)


def test_by_hand():
    # exp of these logits is 1, 2 and 5.
    logits = torch.tensor([[0.0, 2.0, 5.0], [5.0, 1.0, 2.0]]).log_()
    logits[0, 0] = 0.0
    tokens = torch.tensor([1, 0])
    found, entropy = token_log_probs(logits, tokens, with_entropy=True)
    torch.testing.assert_close(found, torch.tensor([2 / 8, 5 / 8]).log())
    shares = torch.tensor([1 / 8, 2 / 8, 5 / 8])
    torch.testing.assert_close(entropy, -(shares * shares.log()).sum().expand(2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_both_routes_agree_with_the_loop(temperature, generator, small_tiles):
    hidden, weight, bias, tokens = problem(generator)
    logits = (hidden @ weight.T + bias).detach()
    rows = list(zip(logits.numpy(), tokens.tolist(), strict=True))
    log_probs = torch.tensor([oracles.log_prob(row, token, temperature) for row, token in rows], dtype=torch.float64)
    entropies = torch.tensor([oracles.entropy(row, temperature) for row, _ in rows], dtype=torch.float64)
    options = {"temperature": temperature, "with_entropy": True}
    for chunk_size in (1, 3, 100):
        found = token_log_probs(logits, tokens, chunk_size=chunk_size, **options)
        torch.testing.assert_close(found, (log_probs, entropies))
        found = linear_log_probs(hidden, weight, tokens, bias=bias, chunk_size=chunk_size, **options)
        torch.testing.assert_close(found, (log_probs, entropies))
    torch.testing.assert_close(token_log_probs(logits, tokens, temperature=temperature), log_probs)
    torch.testing.assert_close(token_entropy(logits, temperature=temperature), entropies)


def test_any_leading_dimensions(generator):
    hidden, weight, _, _ = problem(generator)
    hidden = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(11, (2, 3, 4), generator=generator)
    expected, entropy = plain(hidden @ weight.T, tokens)
    from_logits = token_log_probs(hidden @ weight.T, tokens, with_entropy=True)
    torch.testing.assert_close(from_logits, (expected, entropy))
    from_hidden = linear_log_probs(hidden, weight, tokens)
    torch.testing.assert_close(from_hidden, expected)
    # FSDP2 warns of a view that leaves a module.
    assert not any(x._is_view() for x in (*from_logits, from_hidden))
    assert linear_log_probs(hidden[:0], weight, tokens[:0]).shape == (0, 3, 4)
    assert token_log_probs((hidden @ weight.T)[:0], tokens[:0]).shape == (0, 3, 4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("output", [0, 1, slice(2)], ids=["log_probs", "entropy", "both"])
def test_gradients_match_finite_differences(output, temperature, generator, small_tiles):
    hidden, weight, bias, tokens = problem(generator, rows=4, width=2, vocabulary=6)
    options = {"temperature": temperature, "with_entropy": True, "chunk_size": 3}
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_log_probs(h, w, tokens, bias=b, **options)[output], (hidden, weight, bias)
    )
    logits = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, tokens, **options)[output], logits)


def test_gradients_without_entropy_bias_or_temperature(generator, small_tiles):
    hidden, weight, _, tokens = problem(generator, rows=4, width=2, vocabulary=6)
    assert torch.autograd.gradcheck(lambda h, w: linear_log_probs(h, w, tokens), (hidden, weight))
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, tokens), (hidden @ weight.T).detach().requires_grad_())


def test_the_gradient_is_the_token_minus_the_probabilities():
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().requires_grad_()
    token_log_probs(logits, torch.tensor([1])).backward()
    torch.testing.assert_close(grad_of(logits), torch.tensor([[-1 / 8, 1 - 2 / 8, -5 / 8]]))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen, generator, small_tiles):
    inputs = problem(generator)
    tokens = inputs[-1]
    for index, tensor in enumerate(inputs[:3]):
        tensor.requires_grad_(index != frozen)
    hidden, weight, bias, _ = inputs
    linear_log_probs(hidden, weight, tokens, bias=bias).sum().backward()
    wanted = [tensor for tensor in inputs[:3] if tensor.requires_grad]
    expected = torch.autograd.grad(plain(hidden @ weight.T + bias, tokens)[0].sum(), wanted)
    torch.testing.assert_close([grad_of(tensor) for tensor in wanted], list(expected))
    assert inputs[frozen].grad is None


def test_a_tied_weight_gets_the_gradients_of_both_its_uses(generator, small_tiles):
    _, weight, _, tokens = problem(generator)
    inputs = torch.randint(11, (7,), generator=generator)

    def run(score):
        weight.grad = None
        score(torch.nn.functional.embedding(inputs, weight), weight).square().sum().backward()
        return grad_of(weight).clone()

    expected = run(lambda h, w: plain(h @ w.T, tokens)[0])
    torch.testing.assert_close(run(lambda h, w: linear_log_probs(h, w, tokens)), expected)


class Head(nn.Module):
    """A vocabulary head that scores tokens inside its forward, where FSDP2 has its weight unsharded."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden, tokens):
        return linear_log_probs(hidden, self.weight, tokens)


@pytest.fixture
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_an_unsharded_weight_of_fsdp2_gets_its_gradient_and_a_sharded_one_is_refused(generator):
    hidden, weight, _, tokens = problem(generator)
    head = Head(weight)
    fully_shard(head, mesh=dist.init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    head(hidden, tokens).square().sum().backward()
    expected = torch.autograd.grad(plain(hidden @ weight.T, tokens)[0].square().sum(), (hidden, weight))
    torch.testing.assert_close((grad_of(hidden), grad_of(head.weight).full_tensor()), expected)  # pyright: ignore
    with pytest.raises(TypeError, match="weight must be a plain tensor, got a sharded DTensor; unshard it first"):
        linear_log_probs(hidden, head.weight, tokens)


def test_gradients_accumulate_over_micro_batches(generator):
    hidden, weight, _, tokens = problem(generator)
    expected = torch.autograd.grad(plain(hidden @ weight.T, tokens)[0].square().sum(), weight)[0]
    for rows in (slice(0, 2), slice(2, 7)):
        linear_log_probs(hidden[rows], weight, tokens[rows]).square().sum().backward()
    torch.testing.assert_close(grad_of(weight), expected)


def test_backward_can_run_twice(generator):
    hidden, weight, _, tokens = problem(generator)
    loss = linear_log_probs(hidden, weight, tokens).sum()
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_large_logits_lose_no_digits(temperature, generator):
    logits = (1e4 + 8 * torch.randn(5, 300, generator=generator)).requires_grad_()
    tokens = torch.randint(300, (5,), generator=generator)
    expected, _ = plain(logits, tokens, temperature)
    found = token_log_probs(logits, tokens, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    # One-hot hidden states make the products exact.
    hidden, weight = torch.eye(5), logits.detach().T.contiguous()
    found = linear_log_probs(hidden, weight, tokens, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_forbidden_tokens_have_probability_0(generator, small_tiles):
    logits = torch.tensor([[0.0, -INF, 1.0, -INF, 2.0], [-INF, -INF, 3.0, -INF, -INF]], dtype=torch.float64)
    logits.requires_grad_()
    log_probs, entropy = token_log_probs(logits, torch.tensor([2, 2]), with_entropy=True)
    assert entropy.tolist() == pytest.approx([oracles.entropy(row) for row in logits.detach().numpy()], rel=1e-12)
    assert log_probs[1].item() == 0.0
    (log_probs + entropy).sum().backward()
    kept = logits.detach()[0, ::2].requires_grad_()
    log_prob, kept_entropy = plain(kept, torch.tensor(1))
    expected = torch.autograd.grad(log_prob + kept_entropy, kept)[0]
    torch.testing.assert_close(grad_of(logits)[0, ::2], expected)
    assert grad_of(logits)[0, 1::2].tolist() == [0.0, 0.0]
    assert grad_of(logits)[1].tolist() == [0.0] * 5
    # The same through the head, where a bias of -inf forbids; a whole tile may be forbidden.
    hidden = torch.zeros(2, 1, dtype=torch.float64)
    found = linear_log_probs(hidden, torch.zeros(5, 1).double(), torch.tensor([2, 4]), bias=logits.detach()[0].clone())
    torch.testing.assert_close(found, logits.detach()[0].log_softmax(-1)[[2, 4]])
    assert token_log_probs(logits, torch.tensor([1, 2]))[0].item() == -INF


@pytest.mark.parametrize("with_entropy", [False, True])
def test_masked_rows_are_never_read(with_entropy, generator, small_tiles):
    hidden, weight, bias, tokens = problem(generator)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    clean = hidden.detach().clone().requires_grad_()
    with torch.no_grad():
        hidden[~keep] = torch.tensor([NAN, INF, -INF, 0, 0], dtype=torch.float64)
        tokens[~keep] = -100
    options = {"with_entropy": with_entropy, "chunk_size": 2}
    expected = plain(clean[keep] @ weight.T + bias, tokens[keep])[: 1 + with_entropy]
    found = linear_log_probs(hidden, weight, tokens, bias=bias, mask=keep, **options)
    found = found if with_entropy else (found,)
    torch.testing.assert_close([x[keep] for x in found], list(expected))
    assert all((x[~keep] == 0).all() for x in found)
    gradients = torch.autograd.grad(total(found), (hidden, weight, bias))
    wanted = torch.autograd.grad(total(expected), (clean, weight, bias))
    torch.testing.assert_close(gradients, wanted)
    assert (gradients[0][~keep] == 0).all()
    # From logits, with a gradient that is not 0 at the masked rows' results.
    logits = (hidden @ weight.T + bias).detach().requires_grad_()
    found = token_log_probs(logits, tokens, mask=keep, **options)
    found = found if with_entropy else (found,)
    torch.testing.assert_close([x[keep] for x in found], list(expected))
    total(found).backward()
    assert (grad_of(logits)[~keep] == 0).all()
    assert (grad_of(logits)[keep] != 0).all()


def test_rows_the_loss_ignores_get_gradient_0_whatever_they_hold(generator, small_tiles):
    hidden, weight, _, tokens = problem(generator)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    with torch.no_grad():
        hidden[~keep] = NAN
    logits = (hidden @ weight.T).detach().requires_grad_()
    aggregate(linear_log_probs(hidden, weight, tokens), keep).backward()
    aggregate(token_log_probs(logits, tokens), keep).backward()
    clean = hidden.detach()[keep].requires_grad_()
    wanted = torch.autograd.grad(plain(clean @ weight.T, tokens[keep])[0].mean(), (clean, weight))
    torch.testing.assert_close((grad_of(hidden)[keep], grad_of(weight)), wanted)
    assert (grad_of(hidden)[~keep] == 0).all()
    assert (grad_of(logits)[~keep] == 0).all()


def test_an_empty_mask_gives_0_with_a_graph(generator):
    hidden, weight, bias, tokens = problem(generator)
    nothing = torch.zeros(7, dtype=torch.bool)
    loss = linear_log_probs(hidden, weight, tokens, bias=bias, mask=nothing).sum()
    loss = loss + token_log_probs(hidden @ weight.T, tokens, mask=nothing).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert all((grad_of(x) == 0).all() for x in (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, generator, small_tiles):
    hidden, weight, bias, tokens = (x.detach() for x in problem(generator, rows=40, dtype=torch.float32))
    halves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    wide = [x.detach().float().requires_grad_() for x in halves]
    expected = plain(wide[0] @ wide[1].T + wide[2], tokens)
    found = linear_log_probs(halves[0], halves[1], tokens, bias=halves[2], chunk_size=4, with_entropy=True)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found, expected)  # the same numbers, not just close ones
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), halves)
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].sum(), wide)
    assert [x.dtype for x in gradients] == [dtype] * 3
    # Rounded once at the end: half a unit in the last place.
    torch.testing.assert_close(gradients, [x.to(dtype) for x in wanted], rtol=torch.finfo(dtype).eps, atol=1e-4)
    logits = (wide[0] @ wide[1].T).detach().to(dtype).requires_grad_()
    found = token_log_probs(logits, tokens, with_entropy=True)
    torch.testing.assert_close(found, plain(logits.detach().float(), tokens))
    found[0].sum().backward()
    assert grad_of(logits).dtype == dtype


def test_autocast_changes_nothing(generator):
    hidden, weight, _, tokens = problem(generator, dtype=torch.float32)

    def run():
        found = linear_log_probs(hidden, weight, tokens)
        return found, *torch.autograd.grad(found.sum(), (hidden, weight))

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))


class Allocations(TorchDispatchMode):
    """Largest result of any operation in elements, and weak references to all results' storages; inputs aside."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.largest = 0
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.inputs:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.storages.append(weakref.ref(tensor.untyped_storage()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_head_never_makes_a_tensor_of_tokens_times_vocabulary(with_entropy, dtype, generator):
    hidden, weight, _, tokens = problem(generator, rows=512, width=8, vocabulary=8192, dtype=dtype)
    with Allocations() as allocations:
        found = linear_log_probs(hidden, weight, tokens, with_entropy=with_entropy)
        total(found if with_entropy else (found,)).backward()
    # A tile has 2**21 elements; tokens times vocabulary are 2**22.
    assert allocations.largest == 2**21
    assert weight.grad is not None
    with Allocations() as allocations:
        plain(hidden @ weight.T, tokens)
    assert allocations.largest == 2**22  # what the measurement says of the plain route


@pytest.mark.parametrize(("with_entropy", "tile"), [(False, 2**21), (True, 2**20)])
def test_from_logits_the_gradient_is_the_one_tensor_of_their_size(with_entropy, tile, generator):
    logits = torch.randn(512, 8192, generator=generator, requires_grad=True)
    tokens = torch.randint(8192, (512,), generator=generator)
    with Allocations(logits) as allocations:
        found = token_log_probs(logits, tokens, with_entropy=with_entropy)
        assert allocations.largest == tile
        total(found if with_entropy else (found,)).backward()
    large = {storage for reference in allocations.storages if (storage := reference()) and storage.nbytes() == 2**24}
    assert {storage.data_ptr() for storage in large} == {grad_of(logits).data_ptr()}


def test_no_state_is_kept_without_gradients(generator):
    hidden, weight, _, tokens = problem(generator)

    def survivors():
        with Allocations(hidden, weight, tokens) as allocations:
            found = linear_log_probs(hidden, weight, tokens)
        gc.collect()
        alive = {storage.data_ptr() for reference in allocations.storages if (storage := reference()) is not None}
        return alive - {found.untyped_storage().data_ptr()}, found.requires_grad

    kept, tracked = survivors()
    assert tracked
    assert len(kept) == 2  # the peak and the sum of each row
    with torch.no_grad():
        kept, tracked = survivors()
    assert not tracked
    assert kept == set()


def test_entropy_and_its_gradient_agree_with_published_numbers():
    data = oracles.golden()
    logits = data["entropy/logits"].requires_grad_()
    mean = aggregate(token_entropy(logits), data["mask"].bool())
    torch.testing.assert_close(mean, data["entropy/mean"])
    mean.backward()
    torch.testing.assert_close(grad_of(logits), data["entropy/grad_logits"])


def test_bad_input_is_refused(generator):
    hidden, weight, bias, tokens = problem(generator)
    logits = hidden @ weight.T
    with pytest.raises(TypeError, match=r"mask must be a tensor of dtype torch.bool"):
        token_log_probs(logits, tokens, mask=torch.ones(7))
    for temperature in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature must be > 0"):
            linear_log_probs(hidden, weight, tokens, temperature=temperature)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        linear_log_probs(hidden, weight, tokens, chunk_size=0)
    for token in (-1, 11):
        with pytest.raises(ValueError, match=r"tokens must be in \[0, 11\)"):
            token_log_probs(logits, tokens.index_fill(0, torch.tensor([3]), token))
    with pytest.raises(ValueError, match="tokens must have the shape of logits"):
        token_log_probs(logits, tokens[:-1])
    with pytest.raises(ValueError, match="tokens must have the shape of hidden"):
        linear_log_probs(hidden, weight, tokens[:-1])
    with pytest.raises(ValueError, match=r"weight must be \[V, 5\] to fit hidden, got \(5, 11\)"):
        linear_log_probs(hidden, weight.T, tokens)
    with pytest.raises(ValueError, match=r"bias must be \[11\]"):
        linear_log_probs(hidden, weight, tokens, bias=bias[:-1])
    with pytest.raises(ValueError, match="mask must have the shape of tokens"):
        linear_log_probs(hidden, weight, tokens, mask=torch.ones(6, dtype=torch.bool))
