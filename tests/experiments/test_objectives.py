"""The page of objectives is what the code says, and its curves are where they should be."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.objectives.coefficients import RATIOS, coefficients
from experiments.objectives.page import as_sentence, collected, config_of, notes, page, papers_page
from recjax.algorithms.catalog import FIELD, PAPER
from recjax.algorithms.presets import PRESETS, build_algorithm, resolve
from recjax.config import load_config
from tests.algorithms.test_published import forms_of

ROOT = Path(__file__).parents[2]
DOCS, NOTES = ROOT / "docs", ROOT / "experiments" / "objectives"


def test_the_page_is_what_the_code_says():
    remedy = "write it again: python -m experiments.objectives.page"
    assert (DOCS / "objectives.md").read_text(encoding="utf-8") == page(), remedy
    assert (DOCS / "papers.md").read_text(encoding="utf-8") == papers_page(), remedy
    assert (NOTES / "README.md").read_text(encoding="utf-8") == notes(collected()), remedy
    assert (DOCS / "objectives.png").is_file() and (NOTES / "final_accuracy.png").is_file()


def test_every_preset_is_on_the_page():
    text = page()
    assert all(f"| `{name}` |" in text for name in PRESETS)


def test_notes_keep_the_case_of_symbols():
    assert as_sentence("mean over tokens") == "Mean over tokens."
    for note in ("δ = 0.05 is theirs", "ρ = 1 at first", "λ = 0.1", "verl's cap is 3", "±0.4 is the paper's"):
        assert as_sentence(note) == f"{note}."
    text = papers_page()
    assert all(as_sentence(preset.note) in text for preset in (PAPER | FIELD).values() if preset.note)


@pytest.mark.campaign
def test_every_config_of_the_paper_index_is_taken(tmp_path):
    """Each selects its preset's own choices; added to the quickstart, a run takes it, and the overrides in its note."""
    base = yaml.safe_load((ROOT / "experiments" / "quickstart.yaml").read_text(encoding="utf-8"))
    for name, preset in (PAPER | FIELD).items():
        change = config_of(name)
        merged = base | {"regime": {"sync_interval": 1}, "rollout": base["rollout"] | {"max_completion_tokens": 512}}
        merged |= {block: {**(merged.get(block) or {}), **keys} for block, keys in change.items()}
        if "model" in change:
            merged |= {"model": {"path": "models/POLICY", **change["model"]}, "warm_start": None}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged))
        load_config(tmp_path / "run.yaml")
        for form in forms_of(preset.note):
            blocks = re.findall(r"\w+=\{[^}]*\}", form.replace("length: N", "length: 512"))
            config = load_config(tmp_path / "run.yaml", [f"algorithm.{block}" for block in blocks])
            assert config.algorithm.resolved() != load_config(tmp_path / "run.yaml").algorithm.resolved(), form
        stated = {axis: options for axis, options in change["algorithm"].items() if axis != "preset"}
        assert change["algorithm"]["preset"] == name
        assert resolve(name, stated) == resolve(name, {}) or name == "dr_grpo"


@pytest.mark.campaign
def test_curves_to_check_by_eye():
    def at(name, advantage, ratio):
        curve = coefficients(build_algorithm(name, {}), advantage)
        return curve[np.abs(RATIOS - ratio).argmin()]

    assert at("reinforce", 1.0, 2.0) == 1 and at("reinforce", -1.0, 2.0) == -1
    assert at("rec_one_side_nois", 1.0, 1.3) == 0 and at("rec_one_side_nois", -1.0, 1.3) == -1
    np.testing.assert_allclose([at("cispo", 1.0, 3.0), at("topr", -1.0, 0.5)], [3, -0.5], rtol=0.03)
    assert at("cispo", 1.0, 5.9) == 5
    assert all(coefficients(build_algorithm(name, {}), 1.0) is None for name in ("m2po", "bapo", "p3o"))
