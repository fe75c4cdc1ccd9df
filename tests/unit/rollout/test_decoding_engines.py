"""Both engines against the training forward, and against interruptions. The transformers one with a small random model folder."""

import random

import pytest
import torch

from aimaster.wire.checkpoint import Version
from aimaster.wire.rollout import Piece
from rl_runtime.algo.loss import token_logprobs
from rl_runtime.models.characters import CharacterTokenizer
from rl_runtime.models.load import ModelChoice, load_model
from rl_runtime.models.tiny import Shape
from rl_runtime.rollout.engines import Ending, Generation, Request
from rl_runtime.rollout.make import make_engine
from tests.fakes.model_folder import make_model_folder

TEMPERATURE = 0.8
V0, V1 = Version(0, 0), Version(0, 1)


def tiny_bundle(**sizes):
    shape = Shape(vocab_size=CharacterTokenizer().vocab_size, max_position_embeddings=48, **sizes)
    bundle = load_model(ModelChoice(shape=shape, max_length=48, seed=3))
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.mul_(1.5)  # away from the uniform distribution
    return bundle


@pytest.fixture(scope="module", params=["tiny", "tiny-gqa", "hf"])
def bundle(request, tmp_path_factory):
    """A model of each kind."""
    if request.param == "hf":
        folder = make_model_folder(tmp_path_factory.mktemp("model"))
        return "hf", load_model(ModelChoice(shape=None, folder=str(folder), max_length=48))
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": True} if request.param == "tiny-gqa" else {}
    return "tiny", tiny_bundle(**sizes)


def weights_of(bundle):
    return {name: parameter.detach().clone() for name, parameter in bundle.model.module.named_parameters()}


def engine_for(bundle, slots=8):
    kind, made = bundle
    engine = make_engine(kind, made, slots=slots, temperature=TEMPERATURE)
    engine.load(weights_of(made), V0)
    return engine


def request(bundle, number, dice):
    text = "".join(dice.choice("0123456789") for _ in range(dice.randrange(2, 12))) + "="
    return Request(
        key=str(number), prompt_tokens=tuple(bundle[1].tokenizer.encode(text)), seed=dice.getrandbits(62),
        most_tokens=dice.randrange(1, 20),
    )  # fmt: skip


def generate(engine, requests):
    """Feed requests as slots become free, a few at a time, and return all completions by key."""
    waiting, done = list(requests), {}
    while len(done) < len(requests):
        while waiting and len(engine.in_work()) < engine.slots:
            engine.add(waiting.pop(0))
        done |= {one.request.key: one for one in engine.step()}
    return done


def forward_logprobs(bundle, generation):
    model = bundle[1].model
    prompt = generation.request.prompt_tokens
    ids = torch.tensor([prompt + tuple(generation.tokens)])
    with torch.no_grad():
        logits = model.logits(model.hidden(ids))[0, :-1]
    return token_logprobs(logits, ids[0, 1:], temperature=TEMPERATURE)[len(prompt) - 1 :]


def test_engine_logprobs_are_those_of_the_training_forward(bundle):
    """What the engine reports is what the trainer computes for the same weights, in slots that are refilled all the time."""
    dice = random.Random(1)
    done = generate(engine_for(bundle), [request(bundle, number, dice) for number in range(40)])
    for generation in done.values():
        assert torch.allclose(torch.tensor(generation.logprobs), forward_logprobs(bundle, generation), atol=2e-4)
        assert len(generation.tokens) == generation.request.most_tokens or generation.finish == "stop"
        assert set(generation.versions) == {V0}


def test_a_completion_does_not_depend_on_its_neighbours(bundle):
    """The same requests, one at a time or together in another order, give the same tokens."""
    dice = random.Random(2)
    requests = [request(bundle, number, dice) for number in range(12)]
    together = generate(engine_for(bundle), requests[::-1])
    alone = generate(engine_for(bundle, slots=1), requests)
    assert {key: one.tokens for key, one in together.items()} == {key: one.tokens for key, one in alone.items()}


def test_a_prefix_is_continued_as_if_uninterrupted(bundle):
    """From the tokens streamed by a worker that died, another goes on to the same completion, with the same log-probs."""
    dice = random.Random(3)
    whole = generate(engine_for(bundle), [request(bundle, number, dice) for number in range(12)])
    resumed = []
    for one in whole.values():
        cut = dice.randrange(0, len(one.tokens) + 1)
        piece = one.piece()
        prefix = Piece(tokens=piece.tokens[:cut], logprobs=piece.logprobs[:cut], versions=piece.versions[:cut])
        resumed.append(
            Request(
                key=one.request.key,
                prompt_tokens=one.request.prompt_tokens,
                prefix=prefix,
                seed=one.request.seed,
                most_tokens=one.request.most_tokens,
            )
        )
    for key, again in generate(engine_for(bundle), resumed).items():
        assert again.tokens == whole[key].tokens
        assert again.logprobs == pytest.approx(whole[key].logprobs, abs=2e-4)
        assert again.finish == whole[key].finish


def test_weights_are_swapped_between_tokens(bundle):
    """After a load the next token comes from the new weights and says so; the tokens before it stay."""
    engine = engine_for(bundle)
    first = weights_of(bundle[1])
    dice = random.Random(4)
    engine.add(Request(key="a", prompt_tokens=request(bundle, 0, dice).prompt_tokens, seed=11, most_tokens=12))
    for _ in range(4):
        engine.step()
    before = [*engine.in_work()[0].tokens] if engine.in_work() else None
    if before is None:
        pytest.skip("the completion ended early")
    engine.load({name: weight * 1.2 for name, weight in first.items()}, V1)
    done = []
    while engine.in_work() and not done:
        done = engine.step()
    assert done[0].tokens[: len(before)] == before
    assert done[0].versions == [V0] * len(before) + [V1] * (len(done[0].tokens) - len(before))
    engine.load(first, V0)


def test_long_prompts_are_read_in_parts_with_a_beat(bundle, monkeypatch):
    """However the prompts are cut for reading, the completions are the same; between the parts the engine beats."""
    kind, made = bundle
    if kind != "hf":
        pytest.skip("the small model reads all prompts in a few milliseconds")
    dice = random.Random(8)
    requests = [request(bundle, number, dice) for number in range(8)]
    expected = generate(engine_for(bundle), requests)
    monkeypatch.setattr("rl_runtime.rollout.folder.READ_TOKENS", 16)
    beats = []
    engine = make_engine(kind, made, slots=8, temperature=TEMPERATURE, beat=lambda: beats.append(1))
    engine.load(weights_of(made), V0)
    done = generate(engine, requests)
    assert {key: one.tokens for key, one in done.items()} == {key: one.tokens for key, one in expected.items()}
    for key, one in done.items():
        assert one.logprobs == pytest.approx(expected[key].logprobs, abs=2e-4)
    assert len(beats) >= 5


def test_a_stop_text_ends_a_completion_and_is_part_of_it(bundle):
    """The first token that brings the text about is the last; everything before it is as without the stop text."""
    kind, made = bundle
    stops = ("12", *"3456789abcdefgh")
    dice = random.Random(9)
    requests = [request(bundle, number, dice) for number in range(24)]
    whole = generate(engine_for(bundle), requests)
    engine = make_engine(kind, made, slots=8, temperature=TEMPERATURE, stop_texts=stops)
    engine.load(weights_of(made), V0)
    stopped = 0
    for key, one in generate(engine, requests).items():
        text = made.tokenizer.decode(one.tokens)
        assert one.tokens == whole[key].tokens[: len(one.tokens)]
        assert not any(stop in text[:-1] for stop in stops)
        if text.endswith(stops):
            assert one.finish == "stop"
            stopped += 1
        else:
            assert len(one.tokens) == len(whole[key].tokens)
    assert stopped >= 3


def test_a_streamed_prefix_that_reached_its_end_is_not_continued(bundle):
    """Whatever ended it, stop text or end token, the completion is finished where another worker takes it over."""
    tokenizer = bundle[1].tokenizer
    for tokens, finish in (
        (tokenizer.encode("12=", opening=False), ""),
        (tokenizer.encode("12=7", opening=False), "stop"),
        ([*tokenizer.encode("1", opening=False), tokenizer.eos], "stop"),
        (tokenizer.encode("123456", opening=False), "length"),
    ):
        prefix = Piece(tokens=tuple(tokens), logprobs=(-1.0,) * len(tokens), versions=(V0,) * len(tokens))
        one = Request(key="a", prompt_tokens=(1,), prefix=prefix, seed=0, most_tokens=6)
        assert Generation.begin(one, ending=Ending(tokenizer, ("7",))).finish == finish


def test_dropped_completions_leave_no_trace(bundle):
    """A dropped completion frees its slot, waiting or running, and the others go on unchanged."""
    dice = random.Random(5)
    requests = [request(bundle, number, dice) for number in range(6)]
    expected = generate(engine_for(bundle), requests)
    engine = engine_for(bundle)
    for one in requests[:4]:
        engine.add(one)
    engine.drop(["0", "nobody"])
    done = {one.request.key: one for one in engine.step()}
    engine.drop(["1"])
    for one in requests[4:]:
        engine.add(one)
    while engine.in_work():
        done |= {one.request.key: one for one in engine.step()}
    done.pop("1", None)  # it may have ended with its first token
    assert {key: one.tokens for key, one in done.items()} == {
        key: one.tokens for key, one in expected.items() if key in done
    }
    assert set("2345") <= set(done)
    assert "0" not in done


def test_no_token_is_made_before_the_first_weights(bundle):
    """An engine without weights waits."""
    kind, made = bundle
    engine = make_engine(kind, made, slots=2, temperature=1.0)
    engine.add(request(bundle, 0, random.Random(6)))
    assert engine.step() == []
    assert len(engine.in_work()) == 1
