"""Slopes of cost over size, of seconds that are made up."""

import numpy as np
import pytest

from benchmarks import slopes
from benchmarks.tables import table


def test_slopes_are_the_powers_that_the_seconds_follow(tmp_path):
    powers = dict(zip(slopes.VARIED, (1.0, 0.5, 0.0, 2.0, 1.5, 1.0), strict=True))

    def seconds_of(size):
        relative = [(getattr(size, name) / getattr(slopes.BASE, name)) ** power for name, power in powers.items()]
        return {phase: np.prod(relative) * np.array([1.0, 3.0]) for phase in slopes.PHASES}

    sizes = [slopes.BASE._replace(**{name: value}) for name, values in slopes.VARIED.items() for value in values]
    seconds = {size: seconds_of(size) for size in sizes}
    for name, power in powers.items():
        np.testing.assert_allclose(slopes.slopes(name, "update", seconds), power, atol=1e-9)
    cells = slopes.rows_of(seconds)
    assert len({len(row) for row in cells}) == 1 and cells[4][3] == "2.00 (2.00–2.00)"
    medians = slopes.medians_in("\n".join(table(cells)))
    assert medians["prompts"]["update"] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="no rows"):
        slopes.medians_in("| prompts | 4 |")
    slopes.draw(medians, str(tmp_path / "slopes.png"))
    assert (tmp_path / "slopes.png").stat().st_size > 0
