"""The pair of runs with and without a teacher: their data, and that they differ in nothing else."""

from experiments.self_distillation import hinted
from recjax.config import load_config
from tests.commands import ROOT

FOLDER = ROOT / "experiments/self_distillation"


def test_the_file_of_hints_is_what_its_program_writes():
    assert (FOLDER / "hinted.jsonl").read_text().splitlines() == hinted.lines()


def test_two_runs_differ_only_in_the_teacher(monkeypatch):
    monkeypatch.chdir(ROOT)
    taught, alone = (load_config(FOLDER / f"{name}.yaml") for name in ("with_teacher", "rewards_alone"))
    of_teacher = {
        "model.teacher": None,
        "model.teacher_rate": 1.0,
        "task.teacher_template": None,
        "task.teacher_tokens": None,
    }
    assert taught.replace(output=alone.output, **of_teacher, **{"algorithm.teacher_divergence": {}}) == alone
