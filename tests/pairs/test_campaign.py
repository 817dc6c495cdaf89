"""Every relation on every row of the array; python -m tests.pairs also finds the smallest row that breaks one."""

import pytest

from tests.pairs import covering
from tests.pairs.__main__ import Campaign
from tests.pairs.covering import named
from tests.pairs.materials import Materials
from tests.pairs.relations import RELATIONS

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    return Materials(tmp_path_factory.mktemp("materials"))


@pytest.mark.parametrize("row", covering.stored_array(), ids=named)
def test_no_relation_is_broken(materials, tmp_path, row):
    hits = Campaign(materials, tmp_path, [*RELATIONS]).check(row)
    assert not hits, "\n".join(f"{hit.relation}: {hit.problem}\n{hit.command}" for hit in hits)
