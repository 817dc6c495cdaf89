"""Stores that do not exist yet."""

import pytest

from tests.marks import slow


@pytest.fixture
def db(tmp_path):
    """The file of a store."""
    return tmp_path / "s.db"


@pytest.fixture(params=["SQLite", *slow("PostgreSQL")])
def place(request, tmp_path):
    """The file or URL of a store."""
    if request.param == "SQLite":
        return tmp_path / "s.db"
    return request.getfixturevalue("database_url")()
