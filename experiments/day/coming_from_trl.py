"""A script of TRL's GRPOTrainer, line by line in recjax: the same reward function, the same settings, our names.

    python experiments/day/coming_from_trl.py [key=value …]

docs/coming_from.md has the names of TRL, verl, OpenRLHF and Tunix next to ours.
"""

import sys

import recjax

PROMPTS = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def digits_reward(completions: list[str], **columns: list) -> list[float]:
    """TRL's signature: the completions, and the columns of the data by name. Half a reward for the first digit."""
    pairs = zip(completions, columns["solution"], strict=True)
    return [(text.startswith(solution[0]) + (text == solution)) / 2 for text, solution in pairs]


# GRPOConfig and the arguments of GRPOTrainer, with TRL's names behind ours.
CONFIG = {
    "output": "runs/coming_from_trl",  # output_dir
    "seed": 0,  # seed
    # model: a folder or hub name is model.path
    "model": {"decoder": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}},
    "task": {"file": {"answer_column": None}},
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


def main(overrides: list[str]) -> recjax.Result:
    """Trains and returns the run; overrides such as training.steps=10 change the config."""
    keys = dict(override.split("=", 1) for override in overrides)
    return recjax.run(CONFIG, problems=PROMPTS, reward=digits_reward, **keys)  # train_dataset, reward_funcs


if __name__ == "__main__":
    print(main(sys.argv[1:]).summary)
