"""Prompts as arrays, and which of them each batch asks."""

import numpy as np
import pytest

from recjax.config import RolloutConfig
from recjax.hub.tokenizers import character_tokenizer
from recjax.tasks.problems import Problem, Task, chat
from recjax.tasks.prompts import batch_indices, encode_problems, fitting, without_long_prompts

TOKENIZER = character_tokenizer("0123456789+=")
PROBLEMS = [Problem("1+1=", "2"), Problem("10+10=", "20"), Problem("9=", "9")]


def test_prompts_are_right_padded_and_taken_in_any_order():
    prompts = encode_problems(PROBLEMS, TOKENIZER, None)
    assert prompts.tokens.shape == (3, 6)
    np.testing.assert_array_equal(prompts.mask.sum(-1), [4, 6, 2])
    for row, problem in enumerate(PROBLEMS):
        assert TOKENIZER.decode(prompts.tokens[row][prompts.mask[row]]) == problem.prompt
    taken = prompts.take(np.array([2, 0, 2]))
    assert taken.texts == ["9=", "1+1=", "9="] and taken.answers == ["9", "2", "9"]
    np.testing.assert_array_equal(taken.tokens, prompts.tokens[[2, 0, 2]])


def test_long_prompts_are_refused_with_their_length():
    assert encode_problems(PROBLEMS, TOKENIZER, 8).tokens.shape == (3, 8)
    with pytest.raises(ValueError, match=r"'10\+10=': has 6 tokens.*max_prompt_tokens = 5"):
        encode_problems(PROBLEMS, TOKENIZER, 5)


def test_chats_that_end_with_the_assistant_are_refused():
    problems = [PROBLEMS[0], Problem(chat("", "1+1=", "it is"), "2")]
    with pytest.raises(ValueError, match="prompt 1: the last message is an assistant's, which recjax does"):
        encode_problems(problems, TOKENIZER, None)


def test_message_keys_that_the_template_drops_are_named(caplog):
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    user, reply = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    problems = [Problem([user], "2"), Problem([user, {**reply, "reasoning_content": "1+1"}, user], "2")]
    encode_problems(problems, tokenizer, None)
    words = "1 of 2 prompts have a message with reasoning_content or reasoning or thinking, which the chat template"
    assert words in caplog.text
    problems[1].prompt[1]["tool_calls"] = [{"name": "add", "arguments": {}}]
    with pytest.raises(
        ValueError, match="prompt 1: a message has tool_calls, which the chat template of .* does not write"
    ):
        encode_problems(problems, tokenizer, None)


def test_long_prompts_can_be_dropped_in_order():
    assert fitting(PROBLEMS, TOKENIZER, 5) == [PROBLEMS[0], PROBLEMS[2]]
    assert fitting(PROBLEMS, TOKENIZER, 6) == PROBLEMS  # the limit itself fits

    task = Task(PROBLEMS[:2], PROBLEMS[2:], None)
    drop = RolloutConfig(prompts_per_step=1, max_prompt_tokens=4, long_prompts="drop")
    assert without_long_prompts(task, TOKENIZER, drop)[:2] == (PROBLEMS[:1], PROBLEMS[2:])
    assert without_long_prompts(task, TOKENIZER, RolloutConfig(max_prompt_tokens=4)) is task
    with pytest.raises(
        ValueError, match="max_prompt_tokens = 3: only 0 of 2 train problems and 1 of 1 held-out problems fit"
    ):
        without_long_prompts(task, TOKENIZER, drop.model_copy(update={"max_prompt_tokens": 3}))


def test_each_epoch_shuffles_all_problems():
    drawn = np.concatenate([batch_indices(10, 4, batch, seed=3) for batch in range(1, 11)])  # 4 epochs
    epochs = drawn.reshape(4, 10)
    assert (np.sort(epochs, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 4
    np.testing.assert_array_equal(batch_indices(10, 4, 3, seed=3), drawn[8:12])  # straddles two epochs
    assert (batch_indices(10, 4, 3, seed=3) != batch_indices(10, 4, 3, seed=4)).any()
