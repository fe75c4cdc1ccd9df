"""The small Llama is transformers' Llama, tensor by tensor."""

import pytest
import torch

from rl_runtime.models.base import ModelFolderError
from rl_runtime.models.characters import CharacterTokenizer
from rl_runtime.models.load import ModelChoice, load_model
from rl_runtime.models.tiny import Shape, TinyLlama


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2, "rope_theta": 500.0}])
def test_it_equals_transformers(sizes):
    """Same parameter names, same logits, same gradients."""
    transformers = pytest.importorskip("transformers")
    shape = Shape(vocab_size=48, **sizes)
    ours = TinyLlama(shape, seed=4)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=shape.num_key_value_heads, max_position_embeddings=32, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, tie_word_embeddings=shape.tie_word_embeddings,
        )
    )  # fmt: skip
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if shape.tie_word_embeddings else set())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ids = torch.randint(0, 48, (3, 20), generator=torch.Generator().manual_seed(0))
    ours_out, theirs_out = ours(ids), theirs(ids).logits
    assert torch.allclose(ours_out, theirs_out, atol=1e-5)
    ours_out.square().sum().backward()
    theirs_out.square().sum().backward()
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-4), name


def test_the_seed_makes_the_weights():
    """Every member that begins has the same first weights."""
    shape = Shape(vocab_size=48)
    one, two, other = (TinyLlama(shape, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_sizes_that_do_not_divide_are_refused():
    """The message names the two keys."""
    with pytest.raises(ModelFolderError, match=r"hidden_size = 64 is not a multiple of num_attention_heads = 5"):
        TinyLlama(Shape(vocab_size=48, num_attention_heads=5, num_key_value_heads=5), seed=0)


def test_characters_come_back():
    """What the tokenizer knows comes back as it was; text ends at the end token; strangers become question marks."""
    tokenizer = CharacterTokenizer()
    text = "Tom has 3 apples + 4.\n#### 7"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens[1:]) == text
    assert tokenizer.decode([*tokenizer.encode("12", opening=False), tokenizer.eos, 5]) == "12"
    assert tokenizer.decode(tokenizer.encode("a→b", opening=False)) == "a?b"
    assert max(tokens) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "smollm2-none", "make model"),
        (lambda folder: folder / "none", "nothing is fetched"),
        (lambda folder: folder, "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{}") and folder, "no weights"),
    ],
)
def test_a_folder_that_is_no_model_is_one_clear_error(tmp_path, make, message):
    """A missing folder, one without a config, one without weights: each says what to do."""
    with pytest.raises(ModelFolderError, match=message):
        load_model(ModelChoice(shape=None, folder=str(make(tmp_path)), max_length=8))
