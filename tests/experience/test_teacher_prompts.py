"""A teacher's prompts: the texts of a template, their rows in a batch, completions without a teacher, and limits."""

import json

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.packing import is_packed
from recjax.experience.teacher_prompts import TeacherPrompts
from recjax.hub import chat_rendering
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.tasks.problems import Problem
from tests.training.tiny_run import TINY

TOKENIZER = character_tokenizer("0123456789+=;!abcdefghijklmnopqrstuvwxyz ")
POLICY = Policy(Decoder(DecoderConfig(len(TOKENIZER), 8, 16, 1, 2, 1, 4)), TOKENIZER, (TOKENIZER.eos_token_id,))
PROBLEMS = [Problem("1+2=", "3"), Problem("9+9=", "18")]


@pytest.fixture
def made(tmp_path):
    """A function from template, room and other options to the prompts that they make."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def make(template, room, *options, problems=PROBLEMS):
        teacher_options = ["model.teacher=policy", f"task.teacher_template={json.dumps(template)}"]
        teacher_options += [f"task.teacher_tokens={room}", "algorithm.teacher_divergence.coefficient=0.1", *options]
        return TeacherPrompts(load_config(path, ["output=x", *teacher_options]), POLICY, problems)

    return make


def group(name, prompt, answer, *rewarded):
    """A group of completions with text and reward; a third value is metadata."""
    tokens = np.array([5, 6, 7], np.int32)
    completions = []
    for number, (text, reward, *metadata) in enumerate(rewarded):
        row = Row(tokens, np.array([1, 2], np.int32), np.ones(2, bool), np.zeros(2, np.float32))
        grade = Grade(reward)
        completions.append(
            Completion(f"{name}/{number}", "policy", text, (row,), None, 0, False, grade, (), (), *metadata)
        )
    return Group(name, tokens, tuple(completions), prompt, answer)


def prompts_in(prompts, groups, size=4):
    """The teacher's prompt of each row of the padded batch as text; None without a teacher."""
    batch = prompts(pad(groups, Shape(len(groups) + 1, size, 3, 2)), groups)
    assert (
        batch.teacher_prompts.shape == batch.teacher_prompt_mask.shape == (size * len(groups) + size, prompts._capacity)
    )
    pairs = zip(batch.teacher_prompts, batch.teacher_prompt_mask, strict=True)
    return [TOKENIZER.decode(tokens[mask]) if mask.any() else None for tokens, mask in pairs]


GROUPS = [
    group("a", "1+2=", "3", ("4", 0.0), ("3", 1.0), ("33", 0.5), ("3", 1.0)),
    group("b", "9+9=", "18", ("0", 0.0, {"comment": "too small"}), ("1", 0.0)),
]


def test_each_row_gets_the_prompt_of_its_completion(made):
    answers = [*["3;1+2="] * 4, *["18;9+9="] * 2, *[None] * 6]
    assert prompts_in(made("{answer};{prompt}", 7), GROUPS) == answers
    # The first of the best completions; the best ones themselves, and groups of equal rewards, have none.
    assert prompts_in(made("{prompt}{better}!", 8), GROUPS) == ["1+2=3!", None, "1+2=3!", *[None] * 9]
    assert prompts_in(made("{feedback};{prompt}", 16), GROUPS) == [*[None] * 4, "too small;9+9=", *[None] * 7]
    by_function = made("{feedback};{prompt}", 32, "task.teacher_feedback=tests.experience.test_teacher_prompts:told")
    assert prompts_in(by_function, GROUPS) == ["4 for 1+2= is not 3;1+2=", *[None] * 2, *[None] * 1, *LATER]
    both = made("{answer};{better};{prompt}", 16)
    assert prompts_in(both, GROUPS[:1]) == ["3;3;1+2=", None, "3;3;1+2=", *[None] * 5]
    without_answer = [GROUPS[0]._replace(answer=None)]
    assert prompts_in(made("{answer};{prompt}", 7), without_answer) == [None] * 8
    ungraded = GROUPS[0].completions[0]._replace(grade=None)
    assert prompts_in(both, [GROUPS[0]._replace(completions=(ungraded, *GROUPS[0].completions[1:]))])[:2] == [None] * 2


@pytest.mark.parametrize("truncated", ["train", "mask", "penalize"])
def test_a_better_completion_has_the_rewards_that_count(made, truncated):
    sampled = group("a", "1+2=", "3", ("35", 1.0), ("3", 0.5), ("4", 0.0))
    cut = sampled.completions[0]._replace(truncated=True)
    sampled = sampled._replace(completions=(cut, *sampled.completions[1:]))
    found = prompts_in(made("{better};{prompt}", 9, f"task.truncated={truncated}"), [sampled])[:3]
    shown = {
        "train": [None, "35;1+2=", "35;1+2="],
        "mask": [None, None, "3;1+2="],
        "penalize": ["3;1+2=", None, "3;1+2="],  # the cut one has reward 0
    }
    assert found == shown[truncated]


LATER = ["0 for 9+9= is not 18;9+9=", "1 for 9+9= is not 18;9+9=", *[None] * 6]


def told(prompt, completion, answer):
    """A wrong answer of one digit; nothing to say about others."""
    return f"{completion} for {prompt} is not {answer}" if completion != answer and len(completion) == 1 else None


def test_a_template_that_adds_nothing_gives_the_policys_prompt(made):
    assert prompts_in(made("{prompt}", 4), GROUPS[1:]) == [*["9+9="] * 2, *[None] * 6]


def test_a_chat_keeps_its_other_messages_and_variables(made, monkeypatch):
    seen = []

    def render(tokenizer, chats, variables):
        seen.extend(zip(chats, variables, strict=True))
        return [chat[-1]["content"] for chat in chats]

    monkeypatch.setattr("recjax.tasks.prompts.render_chats", render)
    monkeypatch.setattr(chat_rendering, "reads_variable", lambda *args: True)
    earlier = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    chat = [{"role": "system", "content": "add"}, *earlier, {"role": "user", "content": "1+2="}]
    prompts = made("{answer};{prompt}", 9, problems=[Problem(chat, "3", template={"thinking": True})])
    assert prompts_in(prompts, [group("a", chat, "3", ("4", 0.0))])[0] == "3;1+2="
    taught_chat = [*chat[:3], {"role": "user", "content": "3;1+2="}]
    assert seen == [(taught_chat, {"thinking": True})] * 2 and chat[3]["content"] == "1+2="


def test_too_long_prompts_are_refused_early_and_skipped_later(made, caplog):
    with pytest.raises(
        ValueError, match=r"task.teacher_tokens = 6: the teacher's prompt '18;9\+9=' needs 7 tokens; raise"
    ):
        made("{answer};{prompt}", 6)
    with pytest.raises(ValueError, match="needs 8 tokens, 3 of them for {better}; raise it to 8 or more"):
        made("{prompt}{better}!", 7)
    with pytest.raises(ValueError, match="task.teacher_template: prompt 0, '#1.* outside the tokenizer"):
        made("#{prompt}", 6)
    with pytest.raises(ValueError, match="task.teacher_feedback"):
        made("{prompt}{feedback}", 16, "task.teacher_feedback=tests.experience.test_teacher_prompts:missing")
    prompts = made("{feedback};{prompt}", 10)
    groups = [group("c", "9+9=", "18", ("0", 0.0, {"comment": "small"}), ("1", 0.0, {"comment": "smaller"}))]
    for _ in range(2):
        assert prompts_in(prompts, groups)[:2] == ["small;9+9=", None]
    assert [record.getMessage() for record in caplog.records if "has 12 tokens" in record.getMessage()] != []
    assert sum("task.teacher_tokens = 10" in record.getMessage() for record in caplog.records) == 1
    wrong = group("d", "9+9=", "18", ("0", 0.0, {"comment": 7}))
    with pytest.raises(ValueError, match="row 'd/0': {feedback} = 7: task.teacher_template takes texts"):
        prompts_in(prompts, [wrong])


def test_teacher_prompts_turn_off_packing_by_default(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    taught = ["model.teacher=policy", "task.teacher_template={answer}{prompt}", "task.teacher_tokens=9"]
    options = ["algorithm.teacher_divergence.coefficient=0.1", "rollout.group_size=100000"]
    shape = Shape(1, 100_000, 4, 3)
    assert is_packed(load_config(path, ["output=x", options[1]]), shape)
    assert not is_packed(load_config(path, ["output=x", *taught, *options]), shape)
