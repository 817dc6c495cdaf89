"""Trains two algorithms from one base policy with six seeds each, as a verdict needs, and compares them.

    python experiments/day/verdict.py runs/day/verdict [key=value ...]

Hardware: two CPU cores, about two minutes a run. `base_seed` gives all runs the same base policy and held-out problems,
so seeds differ only in data order and sampling, and every problem of two runs is paired.
"""

import subprocess
import sys
from pathlib import Path

from recjax.config import load_config
from recjax.runs.start import train
from recjax.runtime.cache import keep_compiled_programs

BASE = Path(__file__).parents[1] / "quickstart.yaml"
ALGORITHMS = ("reinforce", "rec_one_side_nois")
SEEDS = range(6)

if __name__ == "__main__":
    folder, *overrides = sys.argv[1:]
    keep_compiled_programs()
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            output = f"{folder}/{algorithm}/{seed}"
            settings = [f"output={output}", f"algorithm.preset={algorithm}", f"seed={seed}", "base_seed=0"]
            if not Path(output, "summary.json").exists():
                train(load_config(BASE, ["training.steps=200", *overrides, *settings]))
    first, second = (f"{folder}/{algorithm}" for algorithm in ALGORITHMS)
    figure, page = f"{folder}/verdict.png", f"{folder}/samples.html"
    subprocess.run([sys.executable, "-m", "recjax.compare", first, second, "--output", figure], check=True)
    samples = [sys.executable, "-m", "recjax.samples", f"{first}/0", f"{second}/0", "--output", page]
    subprocess.run(samples, check=True)
