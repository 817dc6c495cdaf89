"""What the growth benchmark makes of a run's file and of its looks at the process."""

import json
import os

import pandas as pd
import psutil
import pytest

from benchmarks import growth


def test_a_step_lasts_from_one_line_to_the_next(tmp_path):
    rows = [{"step": 0}, *({"step": step, "wall_seconds": 10 + step**2} for step in range(1, 5))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert growth.steps_of(tmp_path / "metrics.jsonl").to_dict() == {2: 3, 3: 5, 4: 7}


def test_tenths_have_the_median_time_and_the_most_held():
    seconds = pd.Series({step: step // 10 + (100 if step % 10 == 5 else 0) for step in range(2, 101)})
    looks = pd.DataFrame({"step": range(0, 101, 2)}).assign(
        memory=lambda of: of["step"] / 2, open_files=7, maps=lambda of: -of["step"], threads=3
    )
    found = growth.tenths(seconds, looks)
    assert list(found.index) == [f"to step {edge}" for edge in range(10, 101, 10)]
    assert list(found["step_seconds"]) == list(range(10))
    assert list(found["memory"]) == list(range(5, 55, 5))
    assert list(found["maps"]) == [-2, *range(-12, -100, -10)]
    assert set(found["open_files"]) == {7}


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="memory maps are Linux's")
def test_open_files_and_memory_are_seen(tmp_path):
    before = growth.look_at(psutil.Process())
    files = [(tmp_path / str(number)).open("w") for number in range(9)]
    after = growth.look_at(psutil.Process())
    for file in files:
        file.close()
    assert after["open_files"] == before["open_files"] + 9
    assert 0 < before["memory"] < 1000 and before["maps"] > 10 and before["threads"] >= 1
