"""The pages that benchmarks.families writes name every family and hold what its limits allow."""

import pytest

from benchmarks.families import CHECKS, DESCRIPTIONS, DOCS, PAGE, differences, from_llama, too_large, with_table
from recjax.hub.families import FAMILIES
from tests.hub import test_families
from tests.hub.test_families import MODELS


def test_the_table_of_families_is_current():
    assert DESCRIPTIONS.keys() == FAMILIES.keys()
    page = DOCS.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m benchmarks.families"
    assert PAGE.read_text(encoding="utf-8").endswith(from_llama())


def test_the_differences_cover_every_checkpoint_and_are_within_limits():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert rows.pop(0)[1:] == [*CHECKS]
    assert [name for name, *_ in rows] == [*MODELS], "run python -m benchmarks.families"
    assert MODELS and {fields["model_type"] for fields in MODELS.values()} == FAMILIES.keys()
    for name, *errors in rows:
        assert not too_large(dict(zip(CHECKS, map(float, errors), strict=True))), name


@pytest.mark.campaign
def test_a_wrong_model_is_seen_by_every_check(monkeypatch):
    load = test_families.load_pretrained

    def changed(folder):
        config, params = load(folder)
        kernel = params["layers"]["query"]["kernel"]
        return config, params | {
            "layers": params["layers"] | {"query": params["layers"]["query"] | {"kernel": -kernel}}
        }

    monkeypatch.setattr(test_families, "load_pretrained", changed)
    assert {*too_large(differences("qwen2"))} == CHECKS.keys()
