"""Compares the runs of arms.yaml as plan.yaml says, and writes a section of benchmarks/RESULTS.md.

python -m experiments.self_distillation.page             # from runs.json
python -m experiments.self_distillation.page --collect   # first reads the finished runs of arms.yaml into runs.json
"""

import json
from pathlib import Path

import pandas as pd
from absl import app, flags

from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import MARGIN, Check
from recjax.analysis.compare import evaluations_of, final, paired_seeds
from recjax.analysis.statistics import band, estimate, holm
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config.yaml_values import read_yaml_file
from recjax.logs.metrics import read_metrics
from recjax.plots.curves import draw_curves
from recjax.plots.style import save_figure
from recjax.runs.folder import is_finished
from recjax.runs.stored_runs import base_policy, starts
from recjax.runtime.console import command

FLAGS = flags.FLAGS
HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "RESULTS.md"
RUNS = HERE / "runs.json"
PLAN = read_yaml_file(HERE / "plan.yaml")
HEADING = "## Self-distillation\n"
ARMS = {
    "rewards_and_teacher": "rewards and teacher",
    "rewards_alone": "rewards alone",
    "teacher_alone": "teacher alone",
}
MEASURES = {"final": "final accuracy", "mean": "mean accuracy over training"}
SUMS, HINTED = "held-out accuracy\non sums (share)", "copied hints (share)"  # columns of the table of evaluations
VERSIONS = ("recjax", "recjax_source", "packages", "python", "platform")


def planned_runs() -> list[SweepRun]:
    """The runs of arms.yaml."""
    return read_sweep(HERE / "arms.yaml")[1]


def run_record(run: SweepRun) -> dict:
    """The settings, origin and evaluations of a finished run.

    Raises:
        ValueError: the run was continued with other versions than those that it was started with.
    """
    folder = Path(run.config.output)
    entries = starts(folder)
    first = {name: entries[0][name] for name in VERSIONS}
    for entry in entries[1:]:
        if {name: entry[name] for name in VERSIONS} != first:
            raise ValueError(f"{folder}: was continued with other versions; delete the folder and make the run again")
    evaluated = [row for row in read_metrics(folder / "metrics.jsonl") if "evaluation/accuracy/sums" in row]
    return {
        **run.settings,
        "overrides": run.overrides[:-1],
        "base_policy": base_policy(folder),
        "commit": entries[0]["commit"],
        "versions": first,
        "evaluations": [
            {
                "step": row["step"],
                "sums": round(row["evaluation/accuracy/sums"], 4),
                "hinted": round(row["evaluation/accuracy/hinted"], 4),
            }
            for row in evaluated
        ],
    }


def collect() -> dict:
    """The content of runs.json: the shared config and versions, and all finished runs.

    Raises:
        ValueError: no run is finished, or the runs cannot be compared; see `check_runs`.
    """
    records = [run_record(run) for run in planned_runs() if is_finished(run.config)]
    if not records:
        raise ValueError("no run of experiments/self_distillation/arms.yaml is finished; start the sweep")
    content = {"config": read_yaml_file(HERE / "with_teacher.yaml"), "versions": records[0]["versions"]}
    for record in records:
        if record["versions"] != content["versions"]:
            first = place_of(records[0])
            raise ValueError(f"{place_of(record)}: was made with other versions than {first}; make it again")
        del record["versions"]
    content["runs"] = records
    check_runs(content)
    return content


def place_of(record: dict) -> str:
    """Names a run for an error."""
    return f"seed {record['seed']}, rate {record['rate']}, {record['arm']}"


def check_runs(content: dict) -> None:
    """Refuses runs of other configs than those of the present files, and runs of a seed with several base policies.

    Args:
        content: of runs.json.
    Raises:
        ValueError: with the file or the run, and what differs.
    """
    if content["config"] != read_yaml_file(HERE / "with_teacher.yaml"):
        raise ValueError("runs.json: its runs have another config than with_teacher.yaml; make the runs again")
    planned = {tuple(run.settings.values()): run.overrides[:-1] for run in planned_runs()}
    bases: dict[str, str] = {}
    for record in content["runs"]:
        if planned.get((record["seed"], record["rate"], record["arm"])) != record["overrides"]:
            raise ValueError(f"runs.json: {place_of(record)}: arms.yaml has no such run; make the run again")
        base = bases.setdefault(record["seed"], record["base_policy"])
        if record["base_policy"] != base:
            raise ValueError(
                f"runs.json: {place_of(record)}: base policy = {record['base_policy']}: another run of the seed has"
                f" {base}; make the runs of this seed again"
            )


def evaluations(content: dict) -> pd.DataFrame:
    """One row an evaluation: seed, rate and arm as text, the step, and accuracy on sums and hinted sums."""
    rows = [
        {
            "seed": record["seed"],
            "rate": record["rate"],
            "arm": record["arm"],
            "step": row["step"],
            SUMS: row["sums"],
            HINTED: row["hinted"],
        }
        for record in content["runs"]
        for row in record["evaluations"]
    ]
    return pd.DataFrame(rows)


def measured(table: pd.DataFrame, measure: str) -> pd.Series:
    """One number a run, by seed, rate and arm: one of MEASURES on sums without a hint."""
    if measure == "final":
        return final(table, SUMS)
    return evaluations_of(table[table["step"] > 0], SUMS).mean()


def at_rates(values: pd.Series, rates: dict[str, str]) -> pd.Series:
    """The numbers of the seeds that are compared, each arm at its own rate, by seed and arm.

    A seed that lacks the run of an arm is left out.
    """
    columns = pd.MultiIndex.from_tuples([(rate, arm) for arm, rate in rates.items()], names=["rate", "arm"])
    seeds = [str(seed) for seed in PLAN["seeds"]]
    by_arm = values.unstack(["rate", "arm"]).reindex(index=seeds, columns=columns).droplevel("rate", axis=1)
    return by_arm.dropna().rename_axis("seed").stack()


def pilot_ends(table: pd.DataFrame) -> pd.DataFrame:
    """Final accuracies of the pilot seeds: a row a seed, a column an arm and rate."""
    ends = final(table, SUMS)
    pilot = [str(seed) for seed in PLAN["pilot_seeds"]]
    columns = pd.MultiIndex.from_product([ARMS, PLAN["rates"]])
    return ends.unstack(["arm", "rate"]).reindex(index=pilot, columns=columns)


def best_rates(ends: pd.DataFrame) -> dict[str, str]:
    """The rate of each arm with the highest mean of the pilot seeds' final accuracies."""
    return {arm: ends[arm].mean().idxmax() for arm in ARMS}


def checks(table: pd.DataFrame, rates: dict[str, str], with_gains: bool) -> list[Check]:
    """The checks of plan.yaml, each arm at its own rate.

    Args:
        rates: by arm.
        with_gains: also compare each arm with its base policy.
    """
    made = []
    for pair in PLAN["pairs"]:
        for measure in PLAN["measures"]:
            values = at_rates(measured(table, measure), rates)
            differences = paired_seeds(values, "arm", pair["first"], pair["second"])
            name = f"{MEASURES[measure]}: {ARMS[pair['first']]} − {ARMS[pair['second']]}"
            made.append(Check(name, pair["expected"], MARGIN, estimate(differences)))
    if with_gains:
        ends = final(table, SUMS)
        begins = table[table["step"] == 0].set_index(ends.index.names)[SUMS]
        gains = at_rates(ends - begins, rates)
        for arm in PLAN["gains"]:
            name = f"final accuracy − base policy's accuracy: {ARMS[arm]}"
            made.append(Check(name, "higher", MARGIN, estimate(gains.xs(arm, level="arm").to_numpy())))
    return made


def checks_text(table: pd.DataFrame, rates: dict[str, str], with_gains: bool) -> str:
    """The table of checks, or the number of seeds if there are too few; for the arguments see `checks`."""
    seeds = at_rates(final(table, SUMS), rates).index.unique("seed")
    if len(seeds) < 2:
        return f"Seeds with runs of all arms: {len(seeds)}, too few for a comparison."
    return checks_table(checks(table, rates, with_gains))


def checks_table(made: list[Check]) -> str:
    """A row a check: mean, spread, p-value after Holm's correction, and outcome; ranges have no p-value."""
    tested = [check for check in made if not check.found.is_range]
    adjusted = dict(zip([check.what for check in tested], holm([check.p_value for check in tested]), strict=True))
    rows = []
    for check in made:
        spread = f"{check.found.low:+.3f} to {check.found.high:+.3f}"
        p_value = adjusted.get(check.what)
        shown = "–" if p_value is None else f"{p_value:.2g}"
        outcome = check.shown
        if outcome == "as claimed" and p_value > PLAN["level"]:
            outcome = "only before the correction"
        rows.append([check.what, f"{check.found.mean:+.3f}", spread, str(check.found.count), shown, outcome])
    head = ["number, expected above 0", "mean", "95 % interval or range", "seeds", "p, Holm", "outcome"]
    return markdown_table(head, rows)


def course_table(table: pd.DataFrame) -> str:
    """Accuracy on sums by step at the common rate, mean and range over the compared seeds, and copied hints."""
    compared = common_runs(table)
    steps = sorted(compared["step"].unique())
    rows = []
    for arm, name in ARMS.items():
        of_arm = compared[compared["arm"] == arm].groupby("step")
        cells = [f"{of_arm[SUMS].mean()[step]:.3f}" for step in steps]
        last = of_arm.get_group(steps[-1])
        cells[-1] += f" ({last[SUMS].min():.3f} to {last[SUMS].max():.3f})"
        copied = of_arm[HINTED].mean()
        rows.append([name, *cells, f"{copied[steps[0]]:.3f} → {copied[steps[-1]]:.3f}"])
    return markdown_table(["", *[f"step {step}" for step in steps], "copied hints"], rows)


def seeds_table(table: pd.DataFrame) -> str:
    """Final accuracy of each compared seed at the common rate, and accuracy of its base policy."""
    compared = common_runs(table)
    ends = final(compared, SUMS)
    begins = compared[compared["step"] == 0].groupby("seed")[SUMS].first()
    rows = [["base policy", *[f"{begins[seed]:.3f}" for seed in begins.index]]]
    for arm, name in ARMS.items():
        of_arm = ends.xs(arm, level="arm").droplevel("rate")
        rows.append([name, *[f"{of_arm[seed]:.3f}" if seed in of_arm else "–" for seed in begins.index]])
    return markdown_table(["final accuracy", *[f"seed {seed}" for seed in begins.index]], rows)


def pilot_text(table: pd.DataFrame) -> str:
    """Final accuracies of the pilot seeds by rate, and the pairs at each arm's best rate if it is another one."""
    ends = pilot_ends(table)
    if ends.isna().to_numpy().any():
        return "The pilot with other learning rates has not been run, so no arm's best rate is known."
    rows = [
        [name, *[", ".join(f"{value:.3f}" for value in ends[arm, rate]) for rate in PLAN["rates"]]]
        for arm, name in ARMS.items()
    ]
    best = best_rates(ends)
    text = markdown_table(["final accuracy of the pilot seeds", *PLAN["rates"]], rows)
    text += "\nBest in the pilot: " + ", ".join(f"{ARMS[arm]} {rate}" for arm, rate in best.items()) + "."
    if best == dict.fromkeys(ARMS, PLAN["common_rate"]):
        return text
    return f"{text}\n\n{checks_text(table, best, with_gains=False)}"


def common_runs(table: pd.DataFrame) -> pd.DataFrame:
    """The evaluations at the common rate of the compared seeds that have runs of all arms."""
    common = dict.fromkeys(ARMS, PLAN["common_rate"])
    seeds = at_rates(final(table, SUMS), common).index.unique("seed")
    return table[table["seed"].isin(seeds) & (table["rate"] == PLAN["common_rate"])]


def section(content: dict) -> str:
    """The section of RESULTS.md, without its heading.

    Raises:
        ValueError: the runs cannot be compared; see `check_runs`.
    """
    check_runs(content)
    table = evaluations(content)
    common = dict.fromkeys(ARMS, PLAN["common_rate"])
    parts = {
        "finished": str(len(content["runs"])),
        "planned": str(len(planned_runs())),
        "course": course_table(table),
        "seeds": seeds_table(table),
        "checks": checks_text(table, common, with_gains=True),
        "pilot": pilot_text(table),
    }
    text = (HERE / "page.md").read_text(encoding="utf-8")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value.strip())
    return text


def with_section(page: str, text: str) -> str:
    """RESULTS.md with another text of this section."""
    before, _, rest = page.partition(HEADING)
    after = rest.partition("\n## ")[2]
    return f"{before}{HEADING}\n{text.strip()}\n\n## {after}"


@command
def main(argv: list[str]) -> None:
    """Writes the section and its figure."""
    if FLAGS.collect:
        RUNS.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")
    content = json.loads(RUNS.read_text(encoding="utf-8"))
    page = RESULTS.read_text(encoding="utf-8")
    RESULTS.write_text(with_section(page, section(content)), encoding="utf-8")
    shown = common_runs(evaluations(content)).sort_values("arm", key=lambda arms: arms.map([*ARMS].index))
    figure = draw_curves(shown, "arm", "rate", [SUMS, HINTED], band=band, names=ARMS | {PLAN["common_rate"]: ""})
    save_figure(figure, HERE / "curves.png")


if __name__ == "__main__":
    flags.DEFINE_bool("collect", False, "Read the finished runs of arms.yaml into runs.json first.")
    app.run(main)
