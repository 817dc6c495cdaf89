"""Kuhn poker for experiments/agents/kuhn.yaml: three cards, two seats, an exact distance to equilibrium.

python -m experiments.agents.kuhn runs/kuhn [runs/OTHER …]     exploitability at each checkpoint: a table and kuhn.png
python -m experiments.agents.kuhn ratios runs/older            mean π/μ by staleness: a table and kuhn_ratios.png
python -m experiments.agents.kuhn                              writes the file of problems again
"""

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from recjax.agents.agent_policy import Seats
from recjax.logs.kept_samples import kept_rows
from recjax.models.placement import put_params
from recjax.plots.style import COLORS, GREY, add_legend, few_ticks, new_figure, save_figure
from recjax.rollout import decoding
from recjax.runs.checkpoint import steps_of
from recjax.runs.policies import checkpoint_reader
from recjax.runs.stored_runs import run_config
from recjax.tasks.problems import Problem

CARDS = "JQK"
DEALS = ["".join(deal) for deal in itertools.permutations(CARDS, 2)]  # the card of who acts first, and of the other
HISTORIES = ("", "pb"), ("p", "b")  # before each decision of who acts first, and of the other
INFORMATION_SETS = [card + history for player in HISTORIES for card in CARDS for history in player]
HERE = Path(__file__).parent


def gain(deal: str, history: str) -> float | None:
    """The chips that who acts first wins; None before the end. p: check or fold, b: bet or call."""
    sign = 1 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1
    return {"pp": sign, "bp": 1, "pbp": -1, "bb": 2 * sign, "pbb": 2 * sign}.get(history)


async def game(problem: Problem, policy: Seats) -> dict[str, float]:
    """One game. The model reads its own card and the moves so far; every reply other than "b" is a pass."""
    deal, first = problem.columns["cards"], problem.columns["first"]
    players, history = (first, "a" if first == "b" else "b"), ""
    while (won := gain(deal, history)) is None:
        turn = len(history) % 2
        reply = await policy.seat(players[turn]).complete(deal[turn] + history, max_tokens=1)
        history += "b" if reply.text == "b" else "p"
    return {players[0]: won, players[1]: -won}


def equilibrium(prompt: str, generator) -> str:
    """A script that plays an equilibrium: as first, it bluffs with a third of the jacks and never bets the others."""
    chance = {"J": 1 / 3, "K": 1.0, "Qpb": 2 / 3, "Kpb": 1.0, "Jp": 1 / 3, "Kp": 1.0, "Qb": 1 / 3, "Kb": 1.0}
    return "b" if generator.random() < chance.get(prompt, 0.0) else "p"


# --- The exact value of strategies.


def value(first: Mapping[str, float], second: Mapping[str, float], deal: str, history: str = "") -> float:
    """The expected gain of who acts first.

    Args:
        first, second: probability of "b" at each information set.
    """
    if (won := gain(deal, history)) is not None:
        return won
    turn = len(history) % 2
    bet = (first, second)[turn][deal[turn] + history]
    return sum(
        chance * value(first, second, deal, history + move) for move, chance in (("b", bet), ("p", 1 - bet)) if chance
    )


def exploitability(bets: Mapping[str, float]) -> float:
    """The mean chips that a best response wins from a policy, over both roles: 0 only in equilibrium.

    Args:
        bets: the policy's probability of "b" at each information set.
    """
    best = []
    for turn, histories in enumerate(HISTORIES):
        places = [card + history for card in CARDS for history in histories]
        pure = (dict(zip(places, moves, strict=True)) for moves in itertools.product((0, 1), repeat=len(places)))
        sides = ((one, bets) if turn == 0 else (bets, one) for one in pure)
        best.append(max((1, -1)[turn] * np.mean([value(*side, deal) for deal in DEALS]) for side in sides))
    return float(np.mean(best))


def average(policies: list[Mapping[str, float]]) -> dict[str, float]:
    """The strategy that plays one of the policies at random, drawn once for each game."""
    own = {}
    for place in INFORMATION_SETS:  # the chance that the player's earlier move leads there: a check
        before = [1 - bets[place[0]] if place.endswith("pb") else 1.0 for bets in policies]
        chances = np.array([bets[place] for bets in policies])
        own[place] = float(chances @ before / max(np.sum(before), 1e-9))
    return own


# --- The policies of a run.


def policies_of(run: Path) -> dict[int, dict[str, float]]:
    """The probability of "b" at each information set, by the step of the run's checkpoints."""
    policy, read_params = checkpoint_reader(run, run_config(run))
    (bet,) = policy.tokenizer.encode("b", add_special_tokens=False)
    rows = [policy.tokenizer.encode(place, add_special_tokens=False) for place in INFORMATION_SETS]
    mask = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    found = {}
    for step in steps_of(run / "checkpoints"):
        scores = decoding.prefill(put_params(read_params(step)), tokens, mask, decoder=policy.decoder)[1]
        found[step] = dict(zip(INFORMATION_SETS, np.asarray(jax.nn.softmax(scores)[:, bet]).tolist(), strict=True))
    return found


def ratios_of(rows: list[dict]) -> dict[int, np.ndarray]:
    """π/μ of the moves of kept completions, by staleness: updates between μ, which sampled a move, and π."""
    found = defaultdict(list)
    for row in rows:
        pairs = zip(row["chosen"], row["probability_now"], row["probability"], strict=True)
        found[row["step"] - 1 - row["version"]] += [now / then for chosen, now, then in pairs if chosen]
    return {staleness: np.array(found[staleness]) for staleness in sorted(found)}


def show_ratios(run: Path) -> None:
    """Prints and draws the mean of π/μ by staleness. Whatever μ is, its expectation is 1."""
    found = ratios_of(kept_rows(run))
    means = np.array([ratios.mean() for ratios in found.values()])
    errors = np.array([ratios.std() / len(ratios) ** 0.5 for ratios in found.values()])
    print(f"{'staleness':>9} {'moves':>6} {'mean':>7} {'error':>7} {'mean |log π/μ|':>15}")
    for (staleness, ratios), mean, error in zip(found.items(), means, errors, strict=True):
        print(f"{staleness:9d} {len(ratios):6d} {mean:7.4f} {error:7.4f} {np.abs(np.log(ratios)).mean():15.4f}")
    stale = np.concatenate([ratios for staleness, ratios in found.items() if staleness])
    print(f"older opponents: {len(stale)} moves, mean {stale.mean():.4f} ± {stale.std() / len(stale) ** 0.5:.4f}")
    figure = new_figure(7, 3.2, "")
    axes = figure.subplots()
    axes.axhline(1, color=GREY, linewidth=1)
    axes.errorbar([*found], means, 2 * errors, color=COLORS[0], fmt="o", markersize=4, capsize=2)
    axes.set(xlabel="staleness (optimizer steps)", ylabel="mean π/μ, ± 2 standard errors")
    few_ticks(axes.xaxis)
    save_figure(figure, HERE / "kuhn_ratios.png")


def main(runs: list[Path]) -> None:
    """Prints and draws the exploitability at each checkpoint: of the policy, and of the average of all so far."""
    figure = new_figure(7, 4, "")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        found = policies_of(run)
        now = [exploitability(bets) for bets in found.values()]
        mean = [exploitability(average(list(found.values())[: count + 1])) for count in range(len(found))]
        color = COLORS[number % len(COLORS)]
        axes.plot([*found], now, color=color, label=f"{run.name}: policy", linewidth=1)
        axes.plot([*found], mean, color=color, label=f"{run.name}: average of all policies so far", linestyle="--")
        print(f"{run.name}\n{'step':>5} {'policy':>8} {'average':>8}")
        shown = {0, 10, 20, 50, 100, 200, 300, 400, max(found)}
        for step, one, other in zip(found, now, mean, strict=True):
            if step in shown:
                print(f"{step:5d} {one:8.3f} {other:8.3f}")
        print("  ".join(f"{place} {chance:.2f}" for place, chance in found[max(found)].items()))
    axes.set(xlabel="optimizer step", ylabel="exploitability (chips a game)", ylim=(0, None))
    add_legend(axes)
    save_figure(figure, HERE / "kuhn.png")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ratios"]:
        show_ratios(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        main([Path(run) for run in sys.argv[1:]])
    else:
        for name in ("train", "held_out"):
            rows = [{"answer": "", "cards": cards, "first": first} for cards in DEALS for first in "ab"]
            prompts = [(row["cards"] + row["first"])[:: 1 if name == "train" else -1] for row in rows]
            lines = [json.dumps({"prompt": prompt, **row}) for prompt, row in zip(prompts, rows, strict=True)]
            (HERE / f"kuhn_{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
