"""The command for seeded faults: a fault that no longer fits is refused, and one that a test sees is listed."""

import pytest

from tests import marks
from tests.faults import seeded
from tests.faults.seeded import FAULTS, SETS, Fault


def test_a_fault_changes_text_that_occurs_once():
    fault = Fault("adds one", "sums.py", "a + b", "a + b + 1", ())
    assert seeded.seeded("total = a + b\n", fault) == "total = a + b + 1\n"
    for text, count in (("total = a - b\n", 0), ("a + b\na + b\n", 2)):
        with pytest.raises(ValueError, match=f"sums.py holds {count} times, not once"):
            seeded.seeded(text, fault)
    with pytest.raises(ValueError, match="no valid Python"):
        seeded.seeded("total = a + b\n", fault._replace(new="a +"))


def test_every_fault_fits_the_code():
    for fault in FAULTS.values():
        seeded.seeded((seeded.HERE / fault.file).read_text(), fault)


def test_each_faults_set_has_a_named_test(request):
    """Looks up the tests that this session has collected, which are all where it runs a whole set."""
    sets = request.config.stash[marks.SETS]
    files = {test.partition("::")[0] for test in sets}
    faults = {
        name: fault for name, fault in FAULTS.items() if all(test.partition("::")[0] in files for test in fault.tests)
    }
    if any("::" in argument for argument in request.config.args) or not faults:
        pytest.skip("this session has not collected the tests of any fault")
    for name, fault in faults.items():
        begins = tuple(test + more for test in fault.tests for more in ("::", "["))
        named = {where for test, where in sets.items() if test in fault.tests or test.startswith(begins)}
        assert fault.set in SETS and fault.set in named, (name, named)


@pytest.mark.campaign
def test_seeing_tests_are_listed_and_the_file_restored(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text("def total(a, b):\n    return a + b\n")
    tests = "from sums import total\n\ndef test_one():\n    assert total(1, 1) == 2\n\n"
    tests += "def test_two():\n    assert total(1, -1) == 0\n\ndef test_blind():\n    assert total(0, 0) == 0\n"
    (tmp_path / "test_sums.py").write_text(tests)
    minus = Fault("subtracts", "sums.py", "a + b", "a - b", ("test_sums.py",))
    unseen = Fault("turns", "sums.py", "a + b", "b + a", ("test_sums.py",))
    monkeypatch.setattr(seeded, "FAULTS", {"minus": minus, "turned": unseen})
    first = {name: found for name, found, _ in seeded.seen_by(tmp_path, ["minus", "turned"], every=False)}
    assert first == {"minus": ["test_sums.py::test_one"], "turned": []}
    [(_, found, _)] = seeded.seen_by(tmp_path, ["minus"], every=True)
    assert found == ["test_sums.py::test_one", "test_sums.py::test_two"]
    assert seeded.failures(tmp_path, ["test_sums.py"]) == [] and "a + b" in (tmp_path / "sums.py").read_text()
    with pytest.raises(RuntimeError, match="exit status"):
        seeded.failures(tmp_path, ["test_missing.py"])
