"""From a row to tokens and back to a reward, with the real model's tokenizer: three worked examples, an answer `#### N`."""

import pytest

from aimaster.settings import load
from rl_runtime.config import rollout_settings
from rl_runtime.data import load_rows
from rl_runtime.models.folder import FolderTokenizer
from rl_runtime.rewards.functions import gsm8k
from rl_runtime.rewards.maths_worker import judge
from rl_runtime.rollout.engines import Ending
from tests.fakes.smollm2 import real_model

pytestmark = pytest.mark.timeout(480)  # the model may have to be made first


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return FolderTokenizer(AutoTokenizer.from_pretrained(real_model(), local_files_only=True))


@pytest.fixture(scope="module")
def example(root):
    return load(str(root / "examples" / "smollm2.toml"), [], {}).job


def test_the_prompt_is_three_examples_and_a_question_and_leaves_room_for_an_answer(tokenizer, example):
    """Tokens give the text back, digits are tokens of their own, and prompt and answer fit the configured length."""
    for row in load_rows(example)[:20]:
        tokens = tokenizer.encode(row["prompt"])
        assert tokenizer.decode(tokens) == row["prompt"]
        assert row["prompt"].count("Question: ") == 4
        assert row["prompt"].count("#### ") == 3
        assert len(tokens) + example.rollout.max_response_length <= example.policy.model_max_length
    assert [tokenizer.decode([token]) for token in tokenizer.encode("#### 128")][-3:] == ["1", "2", "8"]


def test_an_answer_ends_with_its_result_and_earns_by_it(tokenizer, example):
    """Where the model would go on with a question of its own, the blank line ends the answer; both rewards read its `#### N`."""
    row = load_rows(example)[0]
    ending = Ending(tokenizer, rollout_settings(example).stop_texts)
    rambling = tokenizer.encode(f" {row['answer']}\n\nQuestion: How many?\nAnswer:\n#### 999", opening=False)
    reached = next(end for end in range(1, len(rambling) + 1) if ending.is_reached(rambling[:end]))
    text = tokenizer.decode(rambling[:reached])
    assert text.startswith(f" {row['answer']}\n")
    assert "Question" not in text
    assert gsm8k(text, row["answer"]) == judge(text, row["answer"]) == 1.0
    number = row["answer"].rpartition(" ")[2]
    wrong = text.replace(f"#### {number}", f"#### {int(number) + 1}")
    assert gsm8k(wrong, row["answer"]) == judge(wrong, row["answer"]) == 0.0


def test_the_end_token_ends_an_answer(tokenizer):
    """Even without stop texts; what follows it is no text."""
    tokens = tokenizer.encode("four", opening=False)
    assert not Ending(tokenizer).is_reached(tokens)
    assert Ending(tokenizer).is_reached([*tokens, tokenizer.eos])
    assert tokenizer.decode([*tokens, tokenizer.eos, *tokens]) == "four"
