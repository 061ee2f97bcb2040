import itertools
import math

import pytest
import torch

from dapo_components.generation import CausalLMGenerator, GenerationRequest, SamplingParams, WeightUpdateError
from tests.helpers import TINY_MODELS, TINY_VOCAB, plain_logits, tiny_torchtune

ALL_TOKENS = tuple(range(TINY_VOCAB))
PROMPTS = [(3,), (1, 4, 1), (5, 9, 2, 6, 5, 3, 5), (8, 9)]

each_model = pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)


def make_requests(count=12, *, prompts=PROMPTS, seed=0, **sampling):
    """Ragged prompts in turn, a different budget and seed for each."""
    return [
        GenerationRequest(
            request_id=100 + index,
            prompt_tokens=prompts[index % len(prompts)],
            sampling=SamplingParams(**{"max_tokens": 4 + index, "stop_token_ids": (0,), **sampling}),
            seed=seed + index,
        )
        for index in range(count)
    ]


def finish(generator, requests=()):
    generator.submit(requests)
    completions = []
    while generator.num_in_flight():
        completions += generator.step()
    assert len({completion.request_id for completion in completions}) == len(completions)
    return {completion.request_id: completion for completion in completions}


def tokens_of(completions):
    return {request_id: completion.tokens for request_id, completion in completions.items()}


def teacher_forced(model, request, tokens):
    """Log-probs of ``tokens`` by one plain forward pass over prompt, prefix and response."""
    context = [*request.prompt_tokens, *request.prefix_tokens]
    log_probs = (plain_logits(model, [*context, *tokens]) / request.sampling.temperature).log_softmax(-1)
    return [float(log_probs[len(context) - 1 + index, token]) for index, token in enumerate(tokens)]


@pytest.mark.parametrize("tied", [True, False])
@each_model
def test_reported_log_probs_are_those_of_a_plain_forward_pass(build, tied):
    model = build(tied=tied)
    requests = make_requests(temperature=0.8)
    completions = finish(CausalLMGenerator(model, max_slots=3), requests)
    assert {completion.finish_reason for completion in completions.values()} == {"stop", "length"}
    for request in requests:
        completion = completions[request.request_id]
        assert completion.log_probs == pytest.approx(teacher_forced(model, request, completion.tokens), abs=1e-4)
        assert (completion.tokens[-1] == 0) == (completion.finish_reason == "stop")
        assert 0 not in completion.tokens[:-1]
        if completion.finish_reason == "length":
            assert len(completion.tokens) == request.sampling.max_tokens


def test_both_families_draw_the_same_tokens():
    drawn = [
        tokens_of(finish(CausalLMGenerator(build(), max_slots=4), make_requests())) for build in TINY_MODELS.values()
    ]
    assert drawn[0] == drawn[1]


def test_a_torchtune_model_with_projection_biases():
    from torchtune.models.qwen2 import qwen2

    model = qwen2(
        vocab_size=TINY_VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=16,
        intermediate_dim=32,
        max_seq_len=64,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    requests = make_requests()
    completions = finish(CausalLMGenerator(model, max_slots=5), requests)
    for request in requests:
        completion = completions[request.request_id]
        assert completion.log_probs == pytest.approx(teacher_forced(model, request, completion.tokens), abs=1e-4)


@pytest.mark.parametrize("slots", [1, 2, 5, 64])
def test_tokens_depend_on_nothing_but_the_request(slots):
    requests = make_requests(12)
    expected = {}
    for request in requests:
        expected |= tokens_of(finish(CausalLMGenerator(tiny_torchtune()), [request]))
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=slots)
    assert tokens_of(finish(generator, requests)) == expected
    assert tokens_of(finish(generator, requests[::-1])) == expected, "other order, used cache"
    generator.submit(requests[:5])
    early = [completion for _ in range(3) for completion in generator.step()]
    late = finish(generator, requests[5:])
    assert tokens_of({completion.request_id: completion for completion in early} | late) == expected, "late arrivals"


def test_the_same_calls_give_the_same_bits():
    first, second = (finish(CausalLMGenerator(tiny_torchtune(), max_slots=3), make_requests()) for _ in range(2))
    assert first == second


def test_other_seeds_give_other_responses():
    first, second = (finish(CausalLMGenerator(tiny_torchtune()), make_requests(seed=seed)) for seed in (0, 1000))
    assert tokens_of(first) != tokens_of(second)


@each_model
def test_low_temperature_is_argmax(build):
    model = build()
    requests = make_requests(4, temperature=1e-4, max_tokens=10, stop_token_ids=())
    completions = finish(CausalLMGenerator(model), requests)
    for request in requests:
        tokens = list(request.prompt_tokens)
        for _ in range(10):
            tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
        assert completions[request.request_id].tokens == tuple(tokens[-10:])


def test_first_token_frequencies_match_the_model():
    model = tiny_torchtune()
    count, prompt = 3000, (1, 4, 1)
    sampling = SamplingParams(max_tokens=1, temperature=1.3)
    requests = [
        GenerationRequest(request_id=seed, prompt_tokens=prompt, sampling=sampling, seed=seed) for seed in range(count)
    ]
    completions = finish(CausalLMGenerator(model, max_slots=500), requests)
    observed = torch.zeros(TINY_VOCAB)
    for completion in completions.values():
        observed[completion.tokens[0]] += 1
    expected = count * (plain_logits(model, prompt)[-1] / 1.3).softmax(-1)
    assert expected.min() > 5
    # 0.999 quantile of chi-square with 12 degrees of freedom.
    assert float(((observed - expected) ** 2 / expected).sum()) < 32.9


def test_top_k_and_top_p_report_renormalised_log_probs():
    model = tiny_torchtune()
    requests = make_requests(4, top_k=2, max_tokens=6, stop_token_ids=())
    for request, completion in zip(requests, finish(CausalLMGenerator(model), requests).values(), strict=True):
        logits = plain_logits(model, [*request.prompt_tokens, *completion.tokens])
        for index, token in enumerate(completion.tokens):
            kept = logits[len(request.prompt_tokens) - 1 + index].topk(2)
            assert token in kept.indices
            expected = kept.values.log_softmax(-1)[kept.indices.tolist().index(token)]
            assert completion.log_probs[index] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(("stop", "reason"), [(ALL_TOKENS, "stop"), ((), "length")])
def test_one_token_responses_need_no_decoding(stop, reason):
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=2)
    budget = 9 if stop else 1
    completions = finish(generator, make_requests(10, stop_token_ids=stop, max_tokens=budget))
    assert [len(completion.tokens) for completion in completions.values()] == [1] * 10
    assert {completion.finish_reason for completion in completions.values()} == {reason}
    assert generator.num_decode_passes == 0


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_each_distinct_prompt_goes_through_the_model_once(slots):
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=slots)
    finish(generator, make_requests(16))
    assert generator.num_prefill_tokens == sum(map(len, PROMPTS)) == 13
    assert len(generator._prompts) == 0


def test_a_finished_response_gives_its_slot_to_the_next_at_once():
    # Budgets 2, 6, 2, 2 without stop: the first pass of decoding ends requests 0; then 2, then 3 take its slot.
    budgets = [2, 6, 2, 2]
    requests = [
        GenerationRequest(request_id=index, prompt_tokens=(3,), sampling=SamplingParams(max_tokens=budget), seed=index)
        for index, budget in enumerate(budgets)
    ]
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=2)
    generator.submit(requests)
    order = [[completion.request_id for completion in generator.step()] for _ in range(5)]
    assert order == [[0], [2], [3], [], [1]]
    assert generator.num_decode_passes == 5


def test_cache_grows_to_what_the_slots_need_and_goes_with_the_last_request():
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=4)
    largest, afterwards = [], []
    for round_seed in range(0, 60, 12):
        generator.submit(make_requests(12, seed=round_seed, max_tokens=20, stop_token_ids=()))
        sizes = []
        while generator.num_in_flight():
            sizes.append(generator.cache_bytes)
            generator.step()
        largest.append(max(sizes))
        afterwards.append(generator.cache_bytes)
    # 2 layers, keys and values, 4 slots, 2 heads, 7 + 20 positions rounded up to 32, 4 wide, float32.
    assert largest == [2 * 2 * 4 * 2 * 32 * 4 * 4] * 5
    assert afterwards == [0] * 5


def test_abort_of_the_last_request_releases_the_cache():
    generator = CausalLMGenerator(tiny_torchtune())
    requests = make_requests(2, max_tokens=20, stop_token_ids=())
    generator.submit(requests)
    generator.step()
    generator.abort([requests[0].request_id])
    assert generator.cache_bytes > 0
    generator.abort([requests[1].request_id])
    assert generator.cache_bytes == 0


def test_cache_follows_a_response_that_outgrows_it():
    model = tiny_torchtune(max_seq_len=256)
    requests = make_requests(3, max_tokens=200, stop_token_ids=())
    completions = finish(CausalLMGenerator(model, max_slots=2), requests)
    for request in requests:
        completion = completions[request.request_id]
        assert len(completion.tokens) == 200
        assert completion.log_probs == pytest.approx(teacher_forced(model, request, completion.tokens), abs=1e-4)


@each_model
def test_abort_and_resume_from_the_prefix_change_nothing(build):
    requests = make_requests(6, max_tokens=12, stop_token_ids=(0,))
    whole = finish(CausalLMGenerator(build()), requests)
    generator = CausalLMGenerator(build(), max_slots=4)
    generator.submit(requests)
    done = {}
    parts: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {request.request_id: ((), ()) for request in requests}
    for _ in range(20):
        for completion in itertools.chain(generator.step(), generator.step()):
            done[completion.request_id] = completion
        open_requests = [request for request in requests if request.request_id not in done]
        partial = generator.abort([request.request_id for request in open_requests])
        assert generator.num_in_flight() == 0
        for completion in partial:
            assert completion.finish_reason == "abort"
            tokens, log_probs = parts[completion.request_id]
            parts[completion.request_id] = (tokens + completion.tokens, log_probs + completion.log_probs)
        generator.submit(
            [
                GenerationRequest(
                    request_id=request.request_id,
                    prompt_tokens=request.prompt_tokens,
                    sampling=request.sampling,
                    seed=request.seed,
                    prefix_tokens=parts[request.request_id][0],
                )
                for request in open_requests
            ]
        )
    assert len(done) == 6
    for request_id, completion in done.items():
        tokens, log_probs = parts[request_id]
        assert tokens + completion.tokens == whole[request_id].tokens
        assert log_probs + completion.log_probs == pytest.approx(whole[request_id].log_probs, abs=1e-4)
        assert completion.finish_reason == whole[request_id].finish_reason


def test_abort_of_running_waiting_and_unknown_requests():
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=2)
    requests = make_requests(5, max_tokens=9, stop_token_ids=())
    generator.submit(requests)
    generator.step()
    generator.step()
    aborted = generator.abort([requests[1].request_id, requests[4].request_id, 999])
    assert [completion.request_id for completion in aborted] == [101, 104]
    assert [len(completion.tokens) for completion in aborted] == [3, 0]
    assert generator.num_in_flight() == 3
    rest = finish(generator)
    expected = finish(CausalLMGenerator(tiny_torchtune()), requests)
    assert tokens_of(rest) == {request_id: expected[request_id].tokens for request_id in (100, 102, 103)}
    assert generator.abort([100]) == []


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=["distinct", "shared"])
@each_model
def test_weight_update_in_flight_continues_under_the_new_weights(build, prompts):
    model, new = build(1), build(2)
    old = build(1)
    requests = make_requests(4, prompts=prompts, max_tokens=8, stop_token_ids=())
    generator = CausalLMGenerator(model, max_slots=2, version=5)
    generator.submit(requests)
    generator.step()
    generator.step()
    generator.update_weights(new.named_parameters(), version=6)
    completions = finish(generator)
    assert generator.version == 6
    for request, num_old in zip(requests, [3, 3, 0, 0], strict=True):
        completion = completions[request.request_id]
        assert completion.versions == (5,) * num_old + (6,) * (8 - num_old)
        expected = teacher_forced(old, request, completion.tokens)[:num_old]
        expected += teacher_forced(new, request, completion.tokens)[num_old:]
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_shared_module_is_sampled_as_it_is_after_each_update():
    model = tiny_torchtune(1)
    generator = CausalLMGenerator(model)
    requests = make_requests(4)
    finish(generator, requests)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_torchtune(2).parameters(), strict=True):
            parameter.copy_(other)
    generator.update_weights(model.named_parameters(), version=1)
    after = finish(generator, requests)
    assert after == finish(CausalLMGenerator(tiny_torchtune(2), version=1), requests)


def test_a_failed_update_that_changed_something_stops_sampling_until_one_succeeds():
    new = tiny_torchtune(2)
    generator = CausalLMGenerator(tiny_torchtune(1))
    requests = make_requests(4, stop_token_ids=())
    generator.submit(requests)
    with pytest.raises(WeightUpdateError, match="the model has no parameter 'nonsense'; it has "):
        generator.update_weights([("nonsense", torch.zeros(1))], version=1)
    generator.step()  # nothing had changed
    half = list(new.named_parameters())[:3]
    with pytest.raises(WeightUpdateError, match="parameters of the model were not sent"):
        generator.update_weights(half, version=1)
    for call in (generator.step, lambda: generator.submit(requests)):
        with pytest.raises(RuntimeError, match=r"mixture of old and new weights .* update the weights again"):
            call()
    assert generator.version == 0
    generator.update_weights(new.named_parameters(), version=1)
    assert len(finish(generator)) == 4


def test_an_interrupted_update_stops_sampling_too():
    def broken():
        yield next(iter(tiny_torchtune(2).named_parameters()))
        raise KeyboardInterrupt

    generator = CausalLMGenerator(tiny_torchtune(1))
    with pytest.raises(KeyboardInterrupt):
        generator.update_weights(broken(), version=1)
    with pytest.raises(RuntimeError, match="a weight update was interrupted"):
        generator.step()


@each_model
def test_broken_weights_give_errors_and_leave_nothing_behind(build):
    model = build()
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    requests = make_requests(6)
    expected = finish(CausalLMGenerator(build(), max_slots=3, version=2), requests)
    generator = CausalLMGenerator(model, max_slots=3)
    finish(generator, requests)
    generator.update_weights({name: torch.full_like(good[name], torch.nan) for name in good}.items(), version=1)
    broken = finish(generator, requests)
    for completion in broken.values():
        assert completion.finish_reason == "error"
        assert completion.tokens == ()
        assert "NaN or infinite under policy version 1; the weights are probably broken" in completion.error
    generator.update_weights(good.items(), version=2)
    assert finish(generator, requests) == expected


@pytest.mark.parametrize("poison", [7, 0])
def test_nan_in_one_response_does_not_spread_to_the_next_in_its_slot(poison):
    model = tiny_torchtune(tied=False)
    requests = make_requests(12, max_tokens=10, stop_token_ids=())
    expected = finish(CausalLMGenerator(tiny_torchtune(tied=False)), requests)
    with torch.no_grad():
        model.tok_embeddings.weight[poison] = torch.nan
    completions = finish(CausalLMGenerator(model, max_slots=2), requests)
    num_errors = 0
    for request_id, completion in completions.items():
        tokens = expected[request_id].tokens
        if poison in tokens[:-1]:
            num_errors += 1
            assert completion.finish_reason == "error"
            assert completion.tokens == tokens[: tokens.index(poison) + 1]
        else:
            assert completion.finish_reason == "length"
            assert completion.tokens == tokens
            assert all(math.isfinite(log_prob) for log_prob in completion.log_probs)
    assert 2 <= num_errors <= 10


@pytest.mark.gpu
@each_model
def test_on_a_gpu(build):
    model = build().cuda()
    requests = make_requests(temperature=0.8)
    completions = finish(CausalLMGenerator(model, max_slots=3), requests)
    model.cpu()
    for request in requests:
        completion = completions[request.request_id]
        assert completion.log_probs == pytest.approx(teacher_forced(model, request, completion.tokens), abs=1e-3)


def test_an_interrupted_step_loses_no_request(monkeypatch):
    requests = make_requests(6)
    expected = finish(CausalLMGenerator(tiny_torchtune()), requests)
    generator = CausalLMGenerator(tiny_torchtune(), max_slots=3)
    generator.submit(requests)

    def interrupt(*_):
        raise KeyboardInterrupt

    for method in ("run_prompts", "run_tokens"):
        with monkeypatch.context() as patch:
            patch.setattr(generator._runner, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                generator.step()
        assert generator.num_in_flight() == 6
    assert tokens_of(finish(generator)) == tokens_of(expected)


def test_submit_takes_all_requests_or_none():
    generator = CausalLMGenerator(tiny_torchtune())
    too_long = GenerationRequest(request_id=9, prompt_tokens=(1,) * 60, sampling=SamplingParams(max_tokens=5), seed=0)
    with pytest.raises(ValueError, match=r"request 9: prompt and max_tokens must fit in 64 positions .* 60 \+ 5 = 65"):
        generator.submit([*make_requests(2), too_long])
    assert generator.num_in_flight() == 0
    generator.submit(make_requests(2))
    with pytest.raises(ValueError, match="request_id must be unique among requests in flight, got 101 again"):
        generator.submit(make_requests(4)[1:])
    assert generator.num_in_flight() == 2
    assert len(finish(generator)) == 2
    generator.submit(make_requests(2))


def test_length_limit_is_the_smallest_of_three():
    huggingface = TINY_MODELS["huggingface"]()
    assert CausalLMGenerator(huggingface).max_model_len == 64
    assert CausalLMGenerator(huggingface, max_model_len=20).max_model_len == 20
    huggingface.config.sliding_window = 8
    assert CausalLMGenerator(huggingface, max_model_len=20).max_model_len == 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_slots": 0}, "max_slots must be >= 1, got 0"),
        ({"prefill_token_budget": 0}, "prefill_token_budget must be >= 1, got 0"),
        ({"max_model_len": 1}, r"max_model_len must be >= 2 \(one prompt and one new token\), got 1"),
    ],
)
def test_constructor_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        CausalLMGenerator(tiny_torchtune(), **arguments)


def test_constructor_refuses_sharded_parameters(monkeypatch):
    monkeypatch.setattr(torch.nn.Parameter, "full_tensor", lambda self: self, raising=False)
    with pytest.raises(ValueError, match="model must hold whole parameters, got sharded ones"):
        CausalLMGenerator(tiny_torchtune())


def test_close_releases_and_refuses():
    generator = CausalLMGenerator(tiny_torchtune())
    generator.submit(make_requests(3))
    generator.step()
    assert generator.cache_bytes > 0
    generator.close()
    generator.close()
    assert (generator.cache_bytes, generator.num_in_flight()) == (0, 0)
    for call in (generator.step, lambda: generator.submit([]), lambda: generator.update_weights([], version=1)):
        with pytest.raises(RuntimeError, match="the generator is closed; build a new one"):
            call()
