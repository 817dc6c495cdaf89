"""A researcher's day in Python: own problems, a lambda as reward, watch, stop, resume, sample, evaluate, export.

    python experiments/day/from_python.py [steps]

A small decoder learns to reverse three letters, in about a minute on two CPU cores. It prints what each part gives.
"""

import itertools
import sys
import time

from recjax import Config, open_run, run

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in map("".join, itertools.product("abcde", repeat=3))]
config = Config(
    output="runs/reversed",
    model={
        "decoder": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 128}
    },
    warm_start={"steps": 4 * steps, "batch_size": 32, "learning_rate": 3e-3, "wrong_fraction": 0.5},
    rollout={"prompts_per_step": 8, "group_size": 8, "max_completion_tokens": 4},
    regime={"sync_interval": 4},
    algorithm={"preset": "rec_one_side_nois"},
    optimizer={"learning_rate": 1e-3},
    training={"steps": steps, "checkpoint_every": steps // 4, "keep_best": "evaluation/accuracy"},
    evaluation={"every": steps // 4, "problems": 40},
)
partial = 0.2  # a closure: each letter in its place is worth this much
reward = lambda prompts, completions, answers: [  # noqa: E731
    (text == answer) + partial * sum(map(str.__eq__, text, answer))
    for text, answer in zip(completions, answers, strict=True)
]


def watch(row: dict) -> bool:
    """Prints evaluations, and stops at half of the steps."""
    if "evaluation/accuracy" in row:
        print(f"step {row['step']}: held-out accuracy {row['evaluation/accuracy']:.2f}")
    return row["step"] == steps // 2


started = time.monotonic()
result = run(config, problems=rows, reward=reward, on_step=watch)
print(f"{result} after {time.monotonic() - started:.0f} s")
result = run(config, problems=rows, reward=reward)  # resumes
print(f"{result} after {time.monotonic() - started:.0f} s")
print(result.metrics[["step", "reward", "evaluation/accuracy"]].dropna().to_string(index=False))

policy = open_run("runs/reversed", reward).best
prompts = ["abc>", "eda>"]
completions = policy.sample(prompts, temperature=0.5)
for prompt, one, logprobs in zip(prompts, completions, policy.score(prompts, completions), strict=True):
    print(f"{prompt}{one.text} with log-probability {logprobs.sum():.2f}")
numbers, table = policy.evaluate(samples=4)
value, low, high = numbers["metrics"]["accuracy"].values()
print(f"step {policy.step}: accuracy {value:.2f}, 95 % interval {low:.2f} – {high:.2f}")
print(f"wrong most often: {table.groupby('question')['accurate'].mean().idxmin()}")
print(f"exported to {policy.export('models/reversed', dtype='bfloat16')}")
