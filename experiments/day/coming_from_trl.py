"""A script of TRL's GRPOTrainer, line by line in recjax: the same reward function, the same settings, our names.

    python experiments/day/coming_from_trl.py [key=value …]

docs/coming_from.md has the names of TRL, verl, OpenRLHF and Tunix next to ours.
"""

import json
import sys
from pathlib import Path

from recjax.config import make_config
from recjax.training.start import train

PROMPTS = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def digits_reward(completions: list[str], **columns: list) -> list[float]:
    """TRL's signature: the completions, and the columns of the data by name. Half a reward for the first digit."""
    pairs = zip(completions, columns["solution"], strict=True)
    return [(text.startswith(solution[0]) + (text == solution)) / 2 for text, solution in pairs]


def config(data: Path) -> dict:
    """GRPOConfig and the arguments of GRPOTrainer, with TRL's names behind ours."""
    return {
        "output": "runs/coming_from_trl",  # output_dir
        "seed": 0,  # seed
        # model: a folder or hub name is model.path
        "model": {"decoder": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}},
        # train_dataset, reward_funcs
        "task": {"file": {"train": str(data), "answer_column": None}, "reward": "coming_from_trl:digits_reward"},
        "rollout": {
            "prompts_per_step": 8,  # per_device_train_batch_size × devices × accumulation / num_generations
            "group_size": 8,  # num_generations
            "max_completion_tokens": 3,  # max_completion_length
            "temperature": 1.0,  # temperature
        },
        "algorithm": {
            "preset": "grpo",  # loss_type
            "clip": {"epsilon_low": 0.2, "epsilon_high": 0.28},  # epsilon, epsilon_high
            "reference_kl": {"coefficient": 0.01},  # beta
        },
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 1.0},  # learning_rate, max_grad_norm
        # max_steps, num_iterations, save_steps
        "training": {"steps": 100, "updates_per_batch": 1, "checkpoint_every": 50},
        "evaluation": {"every": 50, "problems": 27},  # eval_steps
    }


def main(overrides: list[str]) -> dict:
    """Writes the data, trains, and returns the summary."""
    data = Path("runs/coming_from_trl.jsonl")
    data.parent.mkdir(exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    return train(make_config(config(data), overrides))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
