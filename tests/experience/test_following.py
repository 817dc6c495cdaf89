"""A store that grows: which of its completions are groups to train on, when, and that none is taken twice."""

import json
import shutil
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience import store
from recjax.experience.feedback import give_rewards
from recjax.experience.followed import Followed
from recjax.experience.following import Follower
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from tests.experience.rows import make_row
from tests.training.tiny_run import TINY

TOKENIZER = character_tokenizer("0123456789")
POLICY, NAME = Policy(None, TOKENIZER, (TOKENIZER.eos_token_id,)), tokenizer_name(TOKENIZER)


@pytest.fixture
def following(tmp_path):
    """A function from overrides to a reader of the store in `live`."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    always = [f"experience.store={tmp_path / 'live'}", "experience.follow=true", "rollout.max_context_tokens=12"]

    def reader(*overrides):
        options = [*always, "rollout.temperature=0.9", "rollout.group_size=2", *overrides]
        return Follower(load_config(path, options), POLICY, "this run")

    return reader


def row(number, group=0, **changes):
    plain = {"tokenizer": NAME, "time": datetime.now(UTC), "reward_parts": None, "accurate": None}
    return make_row(number, group, **plain | changes)


def names(found):
    return [list(one.ids) for one in found.candidates]


def test_groups_are_taken_when_they_are_whole_each_once(tmp_path, following):
    reader, live, nothing = following(), tmp_path / "live", Followed()
    assert reader.found(nothing, 1).candidates == []  # there is no folder yet
    store.append(live, [row(0), row(1), row(2, 1, reward=None), row(3, 1)])
    found = reader.found(nothing, 1)
    assert names(found) == [["row 0", "row 1"]] and found.waiting == (1, 2, 1)
    taken = nothing.with_taken(["row 0", "row 1"])
    assert reader.found(taken, 1).candidates == []
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])  # replaces the part
    assert names(reader.found(taken, 1)) == [["row 2", "row 3"]]
    store.append(live, [row(4, 2)])
    taken = reader.compacted(taken.with_taken(["row 2", "row 3"]))
    assert taken == Followed(parts=frozenset({"row 0"}))
    assert Followed.from_json(json.loads(json.dumps(taken.to_json()))) == taken
    # Another process that goes on from there, and a part that is replaced once more.
    shutil.copy(live / "part-00000000.parquet", tmp_path / "copy")
    (tmp_path / "copy").replace(live / "part-00000000.parquet")
    for again in (reader, following()):
        assert names(again.found(taken, 1)) == [["row 4"]]


def test_groups_of_equal_prompts_or_values_have_the_size_of_the_config(tmp_path, following):
    rows = [row(number, number, metadata=json.dumps({"task": number % 2} if number < 4 else {})) for number in range(6)]
    rows = [one._replace(prompt_tokens=np.array([1, 2 + place % 3], np.int32)) for place, one in enumerate(rows)]
    store.append(tmp_path / "live", rows)
    by_prompt = following("experience.group_by=prompt").found(Followed(), 1)
    assert names(by_prompt) == [["row 0", "row 3"], ["row 1", "row 4"], ["row 2", "row 5"]]
    by_task = following("experience.group_by=metadata.task").found(Followed(), 1)
    assert names(by_task) == [["row 0", "row 2"], ["row 1", "row 3"]]
    assert by_task.waiting == (2, 2, 0)  # those without the key are by themselves, and too few


def test_a_session_is_one_completion_of_all_its_rows(tmp_path, following):
    first = row(0, metadata=json.dumps({"run": "this run"}), policy_version=3, trajectory="row 0")
    rows = [first, first._replace(id="row 0+1", completion_mask=np.array([True, False, True]))]
    store.append(tmp_path / "live", rows)
    reader = following()
    (candidate,) = reader.found(Followed(), 4).candidates
    (completion,) = reader.group(candidate, 4).completions
    assert len(completion.rows) == 2 and completion.sampled_tokens == 5 and completion.policy_version == 3


def test_at_its_deadline_a_group_goes_without_some_and_what_comes_later_is_counted(tmp_path, following):
    live, old = tmp_path / "live", datetime.now(UTC) - timedelta(seconds=100)
    rows = [row(0), row(1, reward=None), row(2, 1, reward=None), row(3, 2, reward=None)]
    store.append(live, [one._replace(time=old if number < 3 else one.time) for number, one in enumerate(rows)])
    assert following().found(Followed(), 1).candidates == []
    reader = following("experience.deadline_seconds=60")
    found = reader.found(Followed(), 1)
    assert names(found) == [["row 0"]] and found.candidates[0].unrewarded == ("row 1",)
    assert found.unrewarded == ("row 2",) and found.without_reward == 1 and found.waiting == (1, 1, 1)
    taken = Followed().with_taken(["row 0", "row 1", "row 2"], ["row 1", "row 2"])
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])
    later = reader.found(taken, 1)
    assert later.late == {"row 2"} and later.candidates == []


def test_what_cannot_be_trained_on_is_left_out_by_reason(tmp_path, following):
    rows = [
        row(0, 0, prompt_tokens=None, prompt=store.PROMPT_LEFT_OUT),
        row(1, 1, temperature=0.5),
        row(2, 2, behavior_logprobs=None),
        row(3, 3, length=11),
        row(4, 4, tokenizer="another"),
        row(5, 5),
    ]
    store.append(tmp_path / "live", rows)
    found = following().found(Followed(), 1)
    why = ["no_tokens", "other_sampling", "no_logprobs", "too_long", "no_tokens"]
    assert found.unusable == {f"row {number}": reason for number, reason in enumerate(why)}
    assert names(found) == [["row 5"]]
    reader = following("experience.missing_logprobs=unneeded", "algorithm.preset=red_weight")
    assert [*reader.found(Followed(), 1).unusable.values()] == ["no_tokens", "too_long", "no_tokens"]


def test_versions_are_this_runs_and_the_oldest_come_first(tmp_path, following):
    ours, theirs = (json.dumps({"run": run}) for run in ("this run", "another"))
    versions = [(4, ours), (2, ours), (9, ours), (2, theirs), (0, theirs)]
    rows = [row(n, n, policy_version=version, metadata=run) for n, (version, run) in enumerate(versions)]
    store.append(tmp_path / "live", rows)
    reader = following()
    groups = [reader.group(one, 6) for one in reader.found(Followed(), 6).candidates]
    found = [(one.completions[0].id, one.completions[0].policy_version) for one in groups]
    assert found == [("row 2", None), ("row 3", None), ("row 4", 0), ("row 1", 2), ("row 0", 4)]


def test_a_part_is_damaged_when_it_is_so_twice_and_one_that_is_deleted_is_no_error(tmp_path, following):
    reader, live = following(), tmp_path / "live"
    store.append(live, [row(0)])
    store.append(live, [row(1, 1)])
    assert len(reader.found(Followed(), 1).candidates) == 2
    store.keep_parts(live, lambda first: first != "row 0")
    assert names(reader.found(Followed(), 1)) == [["row 1"]]
    part = live / "part-00000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    assert names(reader.found(Followed(), 1)) == [["row 1"]]  # it may just be being replaced
    with pytest.raises(ValueError, match=r"part-00000001.parquet is damaged"):
        reader.found(Followed(), 1)
