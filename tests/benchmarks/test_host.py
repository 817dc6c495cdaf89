"""The host benchmark's clock and table."""

import numpy as np

from benchmarks import host


def test_a_part_within_another_stops_the_outer_part(monkeypatch):
    now = iter(np.repeat(np.arange(9.0)[:, None], 2, axis=1))
    monkeypatch.setattr(host.Clock, "_now", lambda clock: next(now))
    clock = host.Clock()  # at 0; other until 1, groups until 2, slots until 3, groups until 4, other until 5
    inner = clock.timed("slots", lambda: None)
    clock.timed("groups", inner)()
    clock.end_step()
    (seconds,) = clock.steps
    assert {part: seconds[part][0] for part in ("slots", "groups", "other")} == {"slots": 1, "groups": 2, "other": 2}


def test_slopes_are_the_powers_that_the_seconds_follow():
    measured = {
        rows: [dict.fromkeys(host.PARTS, np.full(2, noise * rows**1.5)) for noise in (1.0, 2.0)] for rows in (4, 16, 64)
    }
    cells = host.rows_of(measured)
    assert cells[1][-1] == "1.50 (1.50–1.50)" and cells[1][1] == "8000.0"
    assert len({len(row) for row in cells}) == 1 and cells[-1][1] == f"{8000.0 * len(host.PARTS):.1f}"
