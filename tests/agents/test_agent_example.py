"""The agent of docs/agents.md is one that works."""

import re
import sys
from pathlib import Path

import pytest

from recjax.tasks.problems import Problem
from tests.agents.test_agents import completions_of, made, sampled  # noqa: F401  (a fixture)

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.mark.slow
def test_the_agent_of_the_docs(made, tmp_path, monkeypatch):  # noqa: F811
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len(example.splitlines()) <= 15
    (tmp_path / "mine_of_the_docs.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    config, policy, params = made("one_turn", "task.agent=mine_of_the_docs:agent", "task.reward_weights={turns: -0.1}")
    groups, grades = sampled(config, policy, params, [Problem("1+2=", "3"), Problem("2+2=", "4")])
    sys.modules.pop("mine_of_the_docs")
    for one, grade in zip(completions_of(groups), grades, strict=True):
        turns = grade.reward_parts["turns"]
        (row,) = one.rows
        assert grade.failure == "none"
        tries = grade.reward_parts["tries"]
        assert tries in (-0.3, -0.1 * (turns - 1))
        assert abs(grade.reward - (grade.reward_parts["accuracy"] + tries - 0.1 * turns)) < 1e-6
        between = policy.tokenizer.decode(row.tokens[~row.mask])
        assert between.count("\n") == turns - 1
