"""Names of the reward parts that recjax adds to the parts of a reward."""

LENGTH = "length"  # part of every reward: completion tokens / rollout.max_completion_tokens
OVERLONG = "overlong"  # part of every reward if task.overlong_tokens is set; see `pool.overlong_penalty`
# parts of agents' rewards: numbers of replies and of the trajectory's rows
TURNS = "turns"
ROWS = "rows"
SHAPING = (LENGTH, OVERLONG, TURNS, ROWS)  # parts that recjax adds to the parts of a reward
SCORE = "score"  # name of the part if a reward is a plain number

# Tasks whose environments give turns and rewards: the built-in agent of the same name plays them.
PLAYED = ("verifiers", "gymnasium")
