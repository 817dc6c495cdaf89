"""Hostile completions through the grading processes: none is rewarded, none hangs, none costs another one.

`python -m tests.faults.completions` prints what was tried, what was as it should be, and what was not.
"""

import time

from recjax.config import Config, GradingConfig
from recjax.rewards.pool import Answered, Grading
from recjax.rewards.reward import load_reward

SECONDS = 2.0
GOOD = {"math": r"\boxed{5}", "guru_math": r"\boxed{5}", "gsm8k": "<answer>5</answer>"}
GOOD["tool_calls"] = "<think>t</think>[]"
ANSWERS = {"tool_calls": "[]"}

INSIDE = [
    *(character * 1_900 for character in "9 *.-^_|$~°π½⁵({[<\\&#%'\"=,;:!"),
    *("9" * 5_000, " " * 49_000, "5" + "." * 1_900, "1," * 900, "1 " * 900, "a " * 900),
    *("x=" * 900 + "5", "5 or " * 300 + "6"),
    *(opening * 900 + "5" + closing * 900 for opening, closing in ("()", "[]", "{}")),
    *(r"\frac{1}{" * count + "5" + "}" * count for count in (15, 200)),
    *(r"\sqrt{" * count + "7" + "}" * count for count in (15, 280)),
    *("9^{9^{9^{9}}}", "10^{10^{10}}", "1e999999999", "1e-999999999", "9!!!!!!!!", "2^{2^{2^{2^{2^{2}}}}}"),
    *("1/0", "0/0"),
    *(r"\sum_{n=1}^{10^{10}} n", r"\prod_{n=1}^{10^9} n", r"\int_0^\infty e^{-x^x} dx", r"\binom{10^9}{5 \cdot 10^8}"),
    *(r"\begin{pmatrix}" * 50, r"\begin{pmatrix}" + "1&" * 500 + r"1\end{pmatrix}^{-1}", r"\pm" * 300, r"\text{" * 300),
    *("__import__('os').system('touch RAN')", "exec('x')", "\ud800", "\0" * 100, "\u202e5\u202c6"),
    *("five " * 300, "hundred " * 200),
    *("pounds " * 250, "5 " + "ounce*" * 250, "5 " + "m/" * 300, "(" * 15 + "x+" * 15 + "1" + ")" * 15),
]  # fmt: skip
WHOLE = [
    *("", " " * 49_000, "*" * 49_000, "." * 49_000, "9" * 49_000, "\n" * 49_000, r"\boxed{" * 7_000, r"\boxed" * 8_000),
    *("<answer>" * 6_000, "</think>" * 6_000, "<think>" * 6_000, "#### " * 9_000),
    "<think></think><answer>" + "a" * 49_000,
    *("<think>t</think>" + "[" * 49_000, "<think>t</think>```json\n" + "\n" * 49_000, "<think>t</think>" + "9" * 5_000),
    *("<think>t</think>" + '{"a":' * 9_000, '<think>t</think>[{"name": "f", "arguments": {"a": 1e999}}]', "x" * 60_000),
]  # fmt: skip


def campaign():
    """(number tried, what was wrong by reward and completion)."""
    config = Config.model_construct(output="", grading=GradingConfig(seconds=SECONDS))
    tried, wrong = 0, {}
    for reward, good in GOOD.items():
        form = "<answer>{}</answer>" if reward == "gsm8k" else r"\boxed{{{}}}"
        said = [*WHOLE, *(form.format(text) for text in INSIDE)]
        asked, answers = [good, *said, good], [ANSWERS.get(reward, "5")] * (len(said) + 2)
        with Grading(config, load_reward(reward)) as grading:
            started = time.monotonic()
            scores = grading.submit(
                [Answered("", text, answer, {}, 1) for text, answer in zip(asked, answers, strict=True)]
            ).result()
            votes = grading.parsed(asked)
            seconds = time.monotonic() - started
        tried += len(said)
        accuracy = scores.parts["accuracy"]
        if not accuracy[0] == accuracy[-1] == 1 or votes[0] is None or votes[0] != votes[-1]:
            wrong[reward] = "a good completion was lost beside bad ones"
        if seconds > SECONDS * len(asked):
            wrong[f"{reward}, time"] = f"took {seconds:.0f} s"
        wrong |= {f"{reward}: {text[:40]!r}": "rewarded" for text, one in zip(said, accuracy[1:-1], strict=True) if one}
    return tried, wrong


if __name__ == "__main__":
    count, bad = campaign()
    print(f"completions: tried {count}, as it should be {count - len(bad)}, not {len(bad)}")
    for key, reason in bad.items():
        print(f"  {key}: {reason}")
