"""Every refusal of the schema: a config of the tiny run with these overrides names key, value and remedy."""

import re

import pytest

from recjax.config import KEYS, MeshConfig, load_config
from recjax.errors import UserError
from tests.training.tiny_run import TINY

ASYNC, ENGINE = ["regime.mode=async", "regime.max_staleness=2"], "rollout.engine=http://127.0.0.1:9"
CONTEXT = "rollout.max_context_tokens=32"
AGENT = ["task.agent=tests.agents.some_agents:one_turn", CONTEXT]
STORE = "experience.store=somewhere"
FOLLOW = [STORE, "experience.follow=true", CONTEXT]
MIX = "experience.mix.store=somewhere"
ENVIRONMENT = "task={arithmetic: ~, reward: ~, verifiers: some-name}"
MIXTURE = "task={arithmetic: ~, reward: ~, mixture: {sums: {arithmetic: {}}}}"
TURNS = "algorithm.advantage={name: turn_returns}"
TWICE = ["training.updates_per_batch=2"]
SHOWN = ["model={decoder: ~, path: base}", "warm_start.demonstrations=shown.jsonl"]
TEMPLATE = ["task.teacher_template={answer}={prompt}", "algorithm.preset=sdpo"]
TEMPLATE = [*TEMPLATE, "model.teacher=policy", "task.teacher_tokens=9"]
LORA = "model.lora={rank: 2, alpha: 8, targets: [query, down]}"

SEATS = [*AGENT, "task.seats={a: policy, b: initial, c: 3, d: 'a:b'}"]
BOTH = [*SEATS, "task.train_seats=[a, b]"]

# One override, a list of them, and parts of the message.
CASES = [
    # Keys and values.
    (["seed=-1", "optimizer.learning_rat=1"], "override 'seed=-1': seed = -1", "unknown key 'optimizer.learning_rat'"),
    ("tracking.wandb={1: x}", "tracking.wandb.1", "takes names that are texts"),
    ("optimizer.learning_rat=1e-6", "'optimizer.learning_rat'", "1e-06", "did you mean 'optimizer.learning_rate'?"),
    ("optimiser.learning_rate=1e-6", "unknown key 'optimiser'", "did you mean 'optimizer'?"),
    ("algorithm.regulariser={}", "unknown key 'algorithm.regulariser'", "did you mean 'algorithm.regularizer'?"),
    ("task.gsm8k.tran=x", "'task.gsm8k.tran'", "'task.gsm8k.train'"),
    ("sync_interval=3", "'sync_interval'", "3", "'regime.sync_interval'"),
    ("num_generations=4", "num_generations is rollout.group_size here (docs/coming_from.md)"),
    ("actor_rollout_ref.rollout.val_kwargs.n=4", "actor_rollout_ref.rollout.val_kwargs.n is evaluation.samples here"),
    ("actor_rollout_ref.actor.optim.weight_decay=1", "optim.weight_decay is optimizer.weight_decay here"),
    ("trainer={save_freq: 5, nnodes: 2}", "trainer.save_freq is training.checkpoint_every here; trainer.nnodes is "),
    ("lora.r=8", "lora.r is model.lora.rank here"),
    ("model.lora.r=8", "model.lora.r is model.lora.rank here"),
    ("model.lora={peft_config: {r: 8}}", "model.lora.peft_config.r is model.lora.rank here"),
    ("model.lora.lora_dropout=0.1", "model.lora.lora_dropout is no setting here"),
    (
        "per_device_train_batch_size=16",
        "per_device_train_batch_size is rollout.prompts_per_step (prompts, not completi",
    ),
    ("weight_sync_steps=4", "weight_sync_steps is regime.sync_interval here"),
    ("push_to_hub=true", "push_to_hub is recjax.export, and then `hf upload`, here"),
    ("load_in_4bit=true", "load_in_4bit is no setting, as recjax quantizes no weights, here"),
    ("deepspeed=zero3.json", "deepspeed is mesh.fsdp here"),
    ("algorithm.weight=no_such_module:f", "algorithm.weight.name = 'no_such_module:f': ModuleNotFoundError"),
    ("algorithm.clip=[one_side]", "algorithm.clip = ['one_side']: takes a mapping"),
    ("full_determinism=true", "full_determinism is always on here"),
    ("critic_learning_rate=1", "critic_learning_rate is no setting here"),
    ("warmup_steps=3", "did you mean 'optimizer.warmup_steps'?"),
    ("xyzzy=1", "unknown key 'xyzzy'", "keys here: seed, base_seed, output, model"),
    ("optimizer=3", "optimizer = 3: takes a mapping"),
    ("optimizer=~", "optimizer = None: takes a mapping"),
    ("tracking=~", "tracking = None: takes a mapping"),
    ("seed", "'seed'", "key=value"),
    ("seed=[1", "seed=[1", "YAML"),
    ("rollout.stop=[a] # note", "rollout.stop=[a] # note", "comment"),
    ("output=${seed}", "output", "${seed}", "not replaced", "\\${"),
    ("algorithm.clip.name=${seed}", "algorithm.clip.name", "${seed}", "not replaced"),
    # Types.
    ("training.steps=many", "training.steps = 'many'", "takes an integer, 0 or more, in decimal digits"),
    ("training.steps=2.5", "training.steps = 2.5", "an integer"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate = 'fast'", "a number"),
    ("optimizer.learning_rate=1:30.5", "optimizer.learning_rate = '1:30.5'", "a number", "decimal digits"),
    ("seed=0x1f", "seed = '0x1f'", "an integer", "decimal digits"),
    ("seed=0o17", "seed = '0o17'", "decimal digits"),
    ("seed=1:30", "seed = '1:30'", "decimal digits"),
    ("seed=yes", "seed = 'yes'", "decimal digits"),
    ("seed=3 # of five", "seed = '3 # of five'", "decimal digits"),
    ("evaluation.initial_kl=maybe", "evaluation.initial_kl = 'maybe'", "takes true or false"),
    ("task.reward_weights={length: 1_0}", "task.reward_weights.length = '1_0'", "a number", "decimal digits"),
    ("rollout.stop=5", "rollout.stop = 5", "a list of texts"),
    ("rollout.stop=[1]", "rollout.stop = [1]", "texts", "quotes"),
    ("task={system_prompt: 5}", "task.system_prompt = 5", "takes text", "quotes"),
    ("training.profile_steps=3", "training.profile_steps = 3", "a list of integers or null"),
    ("training.profile_steps=[[1], [2]]", "training.profile_steps = [[1], [2]]", "a list of integers"),
    ("training.profile_steps=[a, b]", "training.profile_steps = ['a', 'b']", "integers", "decimal digits"),
    # Bounds.
    ("training.steps=0", "training.steps = 0", "1 or more"),
    ("training.steps=-1", "training.steps = -1", "0 or more"),
    ("rollout.slots=0", "rollout.slots = 0", "1 or more"),
    ("rollout.temperature=0", "rollout.temperature = 0", "0.01 or more", "at most 100"),
    ("rollout.temperature=1e-30", "rollout.temperature = 1e-30", "0.01 or more"),
    ("rollout.top_p=1.5", "rollout.top_p = 1.5", "at most 1"),
    ("rollout.min_p=1.5", "rollout.min_p = 1.5", "at most 1"),
    ("evaluation.min_p=-0.1", "evaluation.min_p = -0.1", "0 or more"),
    ("evaluation.temperature=1e-30", "evaluation.temperature = 1e-30", "0.01 to 100", "greedy"),
    ("seed=4294967296", "seed = 4294967296", "at most 4294967295"),
    ("rollout.top_k=9223372036854775808", "rollout.top_k = 9223372036854775808", "64-bit"),
    ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan", "finite"),
    ("optimizer.learning_rate=.inf", "optimizer.learning_rate = inf", "finite"),
    ("optimizer.learning_rate=1e30", "optimizer.learning_rate = 1e+30", "at most 1"),
    ("optimizer.weight_decay=1e30", "optimizer.weight_decay = 1e+30", "at most 1"),
    ("optimizer.beta2=1.0", "optimizer.beta2 = 1.0", "below 1"),
    ("optimizer.epsilon=0", "optimizer.epsilon = 0", "above 0"),
    ("optimizer.epsilon=.inf", "optimizer.epsilon = inf", "finite"),
    (
        ["optimizer.name=sgd", "optimizer.beta1=0.5"],
        "optimizer.beta1 = 0.5",
        "applies only with optimizer.name = adamw",
    ),
    (["optimizer.name=sgd", "optimizer.beta2=0.5"], "beta2 = 0.5: applies only with optimizer.name = adamw; set it"),
    (["optimizer.name=sgd", "optimizer.epsilon=0.5"], "epsilon = 0.5: applies only with optimizer.name = adamw"),
    (["optimizer.name=sgd", "optimizer.weight_decay=0.1"], "optimizer.weight_decay = 0.1", "sgd takes none; remove it"),
    ("optimizer.name=sgdd", "optimizer.name = 'sgdd'", "is no optimizer of optax", "did you mean 'sgd'?"),
    ("optimizer.options.b1=0.5", "optimizer.options.b1 = 0.5", "set optimizer.beta1 instead"),
    (
        "optimizer={name: sgd, options: {momentun: 0.5}}",
        "optimizer.options.momentun = 0.5",
        "is no option of sgd, which takes momentum, nesterov",
        "did you mean 'momentum'?",
    ),
    ("optimizer={name: sgd, options: {nesterov: 1}}", "optimizer.options.nesterov = 1", "takes true or false"),
    ("optimizer={name: lion, options: {b1: yes}}", "optimizer.options.b1 = 'yes'", "takes a number"),
    ("optimizer.name=math:sqrt", "optimizer.name = 'math:sqrt'", "an argument named learning_rate"),
    ("optimizer.epsilon=1e30", "optimizer.epsilon = 1e+30", "at most 1"),
    ("task.success=.inf", "task.success = inf", "finite"),
    ("task.success=.nan", "task.success = nan", "finite"),
    ("task.success=1e30", "task.success = 1e+30", "below 1e+20"),
    ("task.reward_weights={length: .inf}", "task.reward_weights.length = inf", "finite"),
    ("task.agent_failure_reward=1e10", "task.agent_failure_reward = 10000000000.0", "at most 1000000000"),
    ("grading.seconds=0", "grading.seconds = 0", "0.1 or more"),
    ("model.lora={alpha: 0}", "model.lora.alpha = 0", "above 0"),
    ("model.lora={rank: 0}", "model.lora.rank = 0", "1 or more"),
    ("mesh.fsdp=0", "mesh.fsdp = 0", "takes a number of devices, or -1"),
    ([*ASYNC, "regime.generator_seconds=0"], "generator_seconds = 0: takes a number, 1 or more"),
    ("experience.replay.half_life=0", "half_life = 0: takes a number, above 0, or null"),
    ("experience.mix={store: x, share: 1.0, of: batch}", "mix.share = 1.0: takes a number, above 0, below 1"),
    # Forms of texts.
    ("model.freeze=['(']", "model.freeze = ['(']", "'(' is not a regular expression"),
    ("model.chat_date='26.11.2026'", "model.chat_date = '26.11.2026'", "takes a day as YYYY-MM-DD"),
    ("model.chat_date=2026-02-30", "model.chat_date = '2026-02-30'", "takes a day"),
    ("model.chat_date='2026-1-1'", "model.chat_date = '2026-1-1'", "takes a day"),
    ("model.chat_date=today", "model.chat_date = 'today'", "takes a day"),
    ("model.chat_template_kwargs={tools: []}", "model.chat_template_kwargs", "column or field `tools`"),
    ("model.chat_template_kwargs={tokenize: true}", "model.chat_template_kwargs", "tokenize is set by recjax"),
    ("model.chat_template_kwargs={enable-thinking: true}", "model.chat_template_kwargs", "variables", "by name"),
    (["task.agent=alone", CONTEXT], "task.agent = 'alone': takes module:function, tools or environment"),
    (["task.agent=tools", "task.tools=[a]", CONTEXT], "task.tools = ['a']: takes module:name"),
    ([*FOLLOW, "experience.group_by=session"], "group_by = 'session': takes group, prompt, or metadata.KEY"),
    ([*FOLLOW, "experience.group_by=metadata."], "group_by = 'metadata.': takes group, prompt, or metadata.KEY"),
    # Choices.
    ("optimizer.schedule=cosin", "optimizer.schedule = 'cosin'", "did you mean 'cosine'?"),
    ("model.attention=flash", "model.attention = 'flash'", "auto, plain, cudnn, cudnn_lengths, splash"),
    ("model.remat=true", "model.remat = True", "none, attention, dots, full"),
    ("model.dtype=float16", "model.dtype = 'float16'", "did you mean 'bfloat16'?"),
    ("model.lora={targets: [qeury]}", "model.lora.targets = ['qeury']", "takes some of query"),
    ("model.lora={targets: all-linear}", "model.lora.targets = 'all-linear'", "takes some of query, key, value"),
    ("model.lora={targets: [q_proj, [k_proj]]}", "model.lora.targets = ['q_proj', ['k_proj']]", "takes some of query"),
    ("model.lora={targets: []}", "model.lora.targets = []", "takes some of query"),
    ("task.truncated=drop", "task.truncated = 'drop'", "train, mask, penalize"),
    ("task.truncated=penalise", "task.truncated = 'penalise'", "did you mean 'penalize'?"),
    ("rollout.long_prompts=cut", "rollout.long_prompts = 'cut'", "refuse, drop"),
    ("regime.mode=later", "regime.mode = 'later': takes sync, async"),
    ("experience.mix={store: x, of: row}", "mix.of = 'row': takes group, batch"),
    ("experience.replay.priority=age", "priority = 'age': takes none, reward_spread, absolute_advantage, headroom"),
    ([STORE, "experience.missing_logprobs=ignore"], "'ignore': takes error, unneeded, initial, current"),
    # Model.
    ("model.path=some/folder", "model.path", "model.decoder", "exactly one"),
    ("model.decoder=null", "model.path", "found none"),
    ("model.adapter=some/folder", "model.adapter = 'some/folder': does not work with model.decoder"),
    (
        ["model={decoder: ~, path: base, adapter: a, run: b}", "warm_start=null"],
        "model.adapter",
        "not work with model.run",
    ),
    (["model={decoder: ~, adapter: a, freeze: [norm]}"], "model.adapter", "trains the adapter only", "model.freeze"),
    (["model={decoder: ~, adapter: a}", "warm_start={}"], "model.adapter", "model.merge_adapter=true", "warm_start"),
    ("model.merge_adapter=true", "model.merge_adapter = True: applies only with model.adapter"),
    ("model.decoder.num_heads=3", "model.decoder.hidden_size = 16", "num_heads = 3"),
    ("model.decoder.num_kv_heads=4", "model.decoder.num_kv_heads = 4: must divide", "num_heads = 2"),
    ("model.chat_template_kwargs={enable_thinking: false}", "model.chat_template_kwargs", "model.decoder", "remove"),
    ([LORA, "model.freeze=[embedding]"], "model.freeze = ['embedding']: does not work with model.lora; remove one"),
    ("mesh={data: -1, tensor: -1}", "mesh.data = -1: only one of mesh.data and mesh.tensor"),
    ("mesh={fsdp: -1, tensor: -1}", "mesh.fsdp = -1: only one of mesh.fsdp and mesh.tensor"),
    ("model.teacher=somewhere", "model.teacher = 'somewhere': does not apply, as this algorithm reads no teacher"),
    ("model.reference=somewhere", "'somewhere': does not apply", "reads no reference policy", "such as tba, or remove"),
    ("algorithm.teacher_divergence.coefficient=0.1", "algorithm.teacher_divergence", "needs a teacher"),
    (
        ["algorithm.preset=sdpo", "model.teacher=policy"],
        "model.teacher = 'policy': has the weights and prompts of the policy",
        "task.teacher_template, or model.teacher_rate below 1",
    ),
    (
        ["algorithm.preset=sdpo", "model={teacher: x, teacher_rate: 0.5}"],
        "teacher_rate = 0.5",
        "model.teacher = policy",
    ),
    (TEMPLATE[:1], "task.teacher_template = '{answer}={prompt}': applies only with model.teacher"),
    (TEMPLATE[:3], "task.teacher_tokens = None: is required with task.teacher_template"),
    ([*TEMPLATE, *AGENT], "task.teacher_template", "does not work with task.agent"),
    ([*TEMPLATE, *FOLLOW], "task.teacher_template", "does not work with experience.follow; remove one of them"),
    ("task.teacher_tokens=9", "task.teacher_tokens = 9: applies only with task.teacher_template; set it"),
    ("task.teacher_feedback=a:b", "task.teacher_feedback = 'a:b': applies only with task.teacher_template; set it"),
    ([*TEMPLATE, "training.tokens_per_micro_batch=64"], "not work with training.tokens_per_micro_batch"),
    ([*TEMPLATE, "task.teacher_feedback=some:function"], "task.teacher_template has no {feedback}; add it there"),
    ([*TEMPLATE, "task.teacher_tokens=0"], "task.teacher_tokens = 0"),
    ([*TEMPLATE, "task.teacher_template={answer}"], "task.teacher_template = '{answer}': must hold {prompt}"),
    ([*TEMPLATE, "task.teacher_template={prompt:>9999}"], "must hold {prompt}", "without a width"),
    ([*TEMPLATE, "task.teacher_template={prompt}{right}"], "may hold {answer}, {better}, {feedback}"),
    ([*TEMPLATE, "task.teacher_template={prompt"], "task.teacher_template = '{prompt'", "must hold {prompt}"),
    ("rollout.drift.weights=int2", "rollout.drift.weights = 'int2': takes int8, int4, float8, noise"),
    ("rollout.drift={weights: int8, fixed: true}", "rollout.drift.fixed = True", "is for noise"),
    ("rollout.drift={weights: noise, group: 8}", "rollout.drift.group = 8", "is for rounded weights"),
    ("rollout.drift={weights: int8, scale: -1}", "rollout.drift.scale = -1"),
    (["rollout.drift.weights=int8", ENGINE], "rollout.drift = {", "changes the weights of recjax's own sampler"),
    (["rollout.drift.weights=int8", STORE], "rollout.drift = {", "changes the weights of recjax's own sampler"),
    (["rollout.drift={weights: int8, logprobs: exact}", *AGENT], "logprobs = 'exact': scores whole", "task.agent"),
    (
        ["rollout.drift={weights: int8, logprobs: exact}", "rollout.recorded_top_k=4"],
        "rollout.drift.logprobs = 'exact': scores whole completions",
        "remove rollout.recorded_top_k",
    ),
    ("algorithm.score_centering.coefficient=1.0", "algorithm.score_centering", "set rollout.recorded_top_k=128"),
    (
        ["algorithm.score_centering.coefficient=1.0", "rollout={top_k: 4, kept_ids: 0}"],
        "algorithm.score_centering",
        "set rollout.recorded_top_k=128",
    ),
    (
        ["algorithm.score_centering.coefficient=1.0", "rollout.top_k=4", ENGINE],
        "algorithm.score_centering",
        "set rollout.recorded_top_k=128",
    ),
    (
        [
            "algorithm.score_centering.coefficient=1.0",
            "rollout={top_k: 4, drift: {weights: int8, logprobs: exact}}",
        ],
        "rollout.drift.logprobs",
        "algorithm.score_centering reads others",
    ),
    ("algorithm.preset=score_centering", "algorithm.preset", "set rollout.recorded_top_k=128"),
    ("algorithm.observations.coefficient=0.1", "algorithm.observations", "completions of a single turn lack"),
    ("algorithm.preset=echo", "algorithm.preset = 'echo'", "completions of a single turn lack"),
    (
        "algorithm.distillation.coefficient=0.1",
        "{'coefficient': 0.1}: needs a teacher; set model.teacher",
    ),
    (["model={decoder: ~, run: b}", "warm_start={}"], "model.run = 'b': does not work with warm_start; remove one"),
    # Task.
    ("task=gms8k", "override 'task=gms8k'", "'gms8k'", "did you mean 'gsm8k'"),
    ("task=nonsense", "'nonsense'", "arithmetic", "gsm8k", "reasoning_gym:GENERATOR"),
    ("task=reasoning_gym", "'reasoning_gym'", "reasoning_gym:GENERATOR"),
    ("task=gsm8k:easy", "'gsm8k:easy'", "'gsm8k'"),
    ([ENVIRONMENT, CONTEXT, "task.reward=gsm8k"], "task.reward", "does not work with task.verifiers"),
    (
        ["task={arithmetic: ~, reward: ~, gymnasium: a-v0}", CONTEXT, "task.agent=tools", "task.tools=[a:b]"],
        "task.agent",
        "has its own agent",
    ),
    ([*AGENT, "task.agent=gymnasium"], "task.agent = 'gymnasium'", "set task.gymnasium"),
    ([ENVIRONMENT, CONTEXT, "warm_start={}"], "warm_start", "has no answers to show"),
    (
        "task={arithmetic: ~, reward: ~, mixture: {a: {verifiers: b}}}",
        "task.mixture.a.verifiers",
        "no task of a mixture",
    ),
    ("task=verifiers", "'verifiers'", "verifiers:NAME"),
    ("task=reasoning_gym:leter_counting", "'leter_counting'", "did you mean 'letter_counting'"),
    ("task.file.train=a.jsonl", "task.arithmetic", "task.file", "exactly one"),
    ("task.gsm8k.train=x", "task.arithmetic", "task.gsm8k", "exactly one"),
    ("task.arithmetic=null", "task: give exactly one of", "found none"),
    (["task={file: {}}", "task.arithmetic=null"], "task.file.train has no value; set it in the file or as"),
    ("task.reward_device=cpu", "task.reward_device = 'cpu'", "only with task.reward = model:PATH"),
    ("warm_start={demonstrations: x, learning_rate: 1e-5}", "warm_start.demonstrations = 'x'", "only with model.path"),
    ("warm_start.held_out=x", "warm_start.held_out = 'x'", "only with warm_start.demonstrations"),
    ("warm_start.every=5", "warm_start.every = 5", "only with warm_start.demonstrations"),
    ("warm_start.max_tokens=5", "warm_start.max_tokens = 5", "only with warm_start.demonstrations"),
    (SHOWN, "warm_start.learning_rate = 0.002", "set it for demonstrations"),
    (
        [*SHOWN, "warm_start.learning_rate=1e-5", "warm_start.right_first=0.5"],
        "warm_start.right_first = 0.5",
        "does not work with warm_start.demonstrations",
    ),
    (
        [*SHOWN, "warm_start.learning_rate=1e-5", "warm_start.wrong_fraction=0.1"],
        "warm_start.wrong_fraction = 0.1",
        "does not work with warm_start.demonstrations",
    ),
    (
        [*SHOWN, "warm_start.learning_rate=2e-3", STORE, "experience.missing_logprobs=initial"],
        "experience.missing_logprobs = 'initial'",
        "does not work with warm_start.demonstrations",
    ),
    ("task.reward=number_match", "task.reward = 'number_match'", "module:function", "reasoning_gym"),
    ("task.system_prompt=Be brief.", "task.system_prompt = 'Be brief.'", "plain text", "remove it"),
    ("task.truncated_reward=-1", "task.truncated_reward = -1.0", "task.truncated = penalize", "remove"),
    ("task.overlong_tokens=4", "task.overlong_tokens = 4: must be at most rollout.max_completion_tokens = 3"),
    *(
        ([MIXTURE, f"task.{key}={value}"], f"task.{key} = ", "does not work with task.mixture; remove one of them")
        for key, value in (
            ("system_prompt", "Be brief."),
            ("reward", "math"),
            ("reward_device", "cpu"),
            ("reward_weights", "{length: -1}"),
            ("reward_seconds", 5),
            ("reward_retries", 1),
            ("success", 0.5),
            ("verdict", "score"),
        )
    ),
    *(
        ([other, "task.curriculum={}"], "task.curriculum = {", f"does not work with {name}; remove one of them")
        for other, name in ((ASYNC[0], "regime.mode = async"), (STORE, "experience.store"), (MIX, "experience.mix"))
    ),
    ([STORE, "task.keep={}"], "task.keep = {", "does not work with experience.store; remove one of them"),
    ("task.keep={pass_rate: [0.9, 0.1]}", "task.keep.pass_rate = [0.9, 0.1]: takes [lowest, highest]"),
    ("task.keep={pass_rate: [0.1]}", "task.keep.pass_rate = [0.1]: takes [lowest, highest]"),
    (
        "task={arithmetic: ~, reward: math, file: {train: x, answer_column: ~}}",
        "task.file.answer_column = None: the reward math compares completions with answers; name their column",
    ),
    (
        "task={arithmetic: ~, reward: ~, mixture: {own: {file: {}}}}",
        "task.mixture.own.file.train = 'rows': takes a file: recjax.run adds no rows to a mixture",
    ),
    # Agents.
    (AGENT[:1], "rollout.max_context_tokens = None: is required with task.agent"),
    (CONTEXT, "rollout.max_context_tokens = 32: applies only with task.agent or experience.follow; set one of them"),
    ([*AGENT, "rollout.max_context_tokens=3"], "must be above rollout.max_completion_tokens = 3"),
    (
        ["task.agent=environment", "task.environment=a:b", CONTEXT, STORE, "experience.regrade=true"],
        "experience.regrade = True: does not work with task.agent = environment, which gives the rewards itself",
    ),
    ([*AGENT, "task.overlong_tokens=2"], "task.overlong_tokens = 2: does not work with task.agent"),
    (
        [*AGENT, "algorithm.advantage={name: discounted}"],
        "advantage = {'name': 'discounted'}: computes advantages of tokens",
    ),
    (TURNS, "advantage = {'name': 'turn_returns'}: reads the turns of agents", "set task.agent or experience.store"),
    (
        [*AGENT, TURNS, "task.truncated=penalize"],
        "task.truncated = 'penalize': replaces rewards, but",
        "the rewards of turns",
    ),
    (
        ["task.agent=tools", CONTEXT],
        "task.tools = []: is required with task.agent = tools; set it: module:function",
    ),
    (
        ["task.agent=environment", CONTEXT],
        "task.environment = None: is required with task.agent = environment; set it: module:class",
    ),
    ("task.agent_seconds=3", "task.agent_seconds = 3.0: applies only with task.agent; set it"),
    ("task.agent_turns=3", "task.agent_turns = 3: applies only with task.agent; set it"),
    ("task.agent_failure_reward=-1", "task.agent_failure_reward = -1.0: applies only with task.agent; set it"),
    ("task.tool_seconds=3", "task.tool_seconds = 3.0: applies only with task.agent = tools; set it"),
    ("task.seats={a: policy}", "task.seats = {'a': 'policy'}: applies only with task.agent; set it"),
    (
        [*AGENT, "task.seats={a: me}"],
        "task.seats.a = 'me': takes policy, initial, a number of steps, or module:function",
    ),
    *(
        ([CONTEXT, f"task.agent={name}", f"task.{extra}", "task.seats={a: policy}"], f"work with task.agent = {name}")
        for name, extra in (("tools", "tools=['a:b']"), ("environment", "environment=a:b"))
    ),
    ([*SEATS, "task.curriculum={}"], "task.seats = {'a': 'policy'", "does not work with task.curriculum; remove one"),
    ([*SEATS, "task.keep={}"], "task.seats = {'a': 'policy'", "does not work with task.keep; remove one of them"),
    ([*AGENT, "task.seats={a: initial}"], "task.seats = {'a': 'initial'}: the policy plays no seat; set one to policy"),
    ([*AGENT, "task.seats={a: policy, b: 4}"], "task.seats.b = 4: must be a multiple of training.checkpoint_every = 3"),
    ([*AGENT, "task.train_seats=[a]"], "task.train_seats = ['a']: applies only with task.seats; set it"),
    (
        [*SEATS, "task.train_seats=[a, a]"],
        "task.train_seats = ['a', 'a']: names seats of task.seats, each once: a, b, c, d",
    ),
    ([*SEATS, "task.train_seats=[x]"], "task.train_seats = ['x']: names seats of task.seats, each once"),
    ([*SEATS, "task.train_seats=[a, d]"], "task.train_seats = ['a', 'd']: a script plays one of them", "remove it"),
    ([*BOTH, "rollout.prompts_per_step=5"], "rollout.prompts_per_step = 5: must be a multiple of the 2 seats to train"),
    (
        [*BOTH, *ASYNC],
        "task.train_seats = ['a', 'b']: does not work with regime.max_staleness, which the frozen weights",
    ),
    ([*AGENT, "task.tools=['a:b']"], "task.tools = ['a:b']: applies only with task.agent = tools; set it"),
    ([*AGENT, "task.environment=a:b"], "task.environment = 'a:b': applies only with task.agent = environment"),
    # Sampling and staleness.
    ([*AGENT, ENGINE], "rollout.engine.url = 'http://127.0.0.1:9': samples single turns; remove task.agent, or"),
    ([STORE, ENGINE], "url = 'http://127.0.0.1:9': does nothing with experience.store", "remove it"),
    ("rollout.long_prompts=drop", "rollout.long_prompts = 'drop'", "rollout.max_prompt_tokens; set it"),
    (["regime.offline=true", "regime.sync_interval=20"], "regime.sync_interval = 20", "regime.offline; remove one"),
    (["regime.offline=true", "regime.sync_offset=2"], "regime.sync_offset = 2", "regime.offline; remove one"),
    ("regime.max_staleness=2", "max_staleness = 2: applies only with regime.mode = async or experience.follow"),
    ("regime.generators=2", "generators = 2: applies only with regime.mode = async; set it"),
    ("regime.swap_within=true", "swap_within = True: applies only with regime.mode = async"),
    ("regime.address=auto", "address = 'auto': applies only with regime.mode = async"),
    ("regime.generator_seconds=5", "generator_seconds = 5.0: applies only with regime.mode = async"),
    ([*ASYNC, ENGINE, "regime.generators=2"], "generators = 2: does not work with rollout.engine; remove one"),
    ([*ASYNC, ENGINE, "regime.swap_within=true"], "swap_within = True: does not work with rollout.engine"),
    ([*ASYNC, ENGINE, "regime.address=auto"], "address = 'auto': does not work with rollout.engine"),
    ([*ASYNC, ENGINE, "regime.generator_seconds=5"], "generator_seconds = 5.0: does not work with rollout.engine"),
    ("regime.mode=async", "max_staleness = None: is required with regime.mode = async"),
    ([*ASYNC, "regime.offline=true"], "offline = True: does not work with regime.mode = async"),
    ([*ASYNC, "regime.sync_offset=1"], "sync_offset = 1: does not work with regime.mode = async"),
    ([*ASYNC, "regime.sync_interval=4"], "max_staleness = 2: must be at least 3", "due to regime.sync_interval = 4"),
    ([*ASYNC, "experience.replay.draw_every=4"], "must be at least 3", "draw_every = 4"),
    ([*ASYNC, STORE], "regime.mode = 'async': does not work with experience.store"),
    ([*ASYNC, "training.updates_per_batch=4"], "max_staleness = 2: must be at least 3", "and 4 updates of each batch"),
    # Experience.
    ("experience={}", "experience: give at least one of store, mix, late, replay, refill and record"),
    (
        "experience.missing_logprobs=initial",
        "missing_logprobs = 'initial': applies only with experience.store or",
    ),
    ("experience.mix={store: x, share: 0.3}", "mix.share = 0.3", "whole number out of rollout.group_size = 4"),
    ("experience.mix.share=0.5", "experience.mix.store has no value"),
    ("experience.late={shortest: 3, longest: 2}", "late.longest = 2: must be at least", "shortest = 3"),
    ("experience.late={shortest: 3, longest: 5, deadline: 2}", "late.deadline = 2: must be at least", "shortest = 3"),
    ("experience.replay.capacity=3", "capacity = 3: must hold the 4 groups of a batch"),
    ("experience.replay={draw_every: 5}", "max_reuse = 4: must be at least experience.replay.draw_every = 5"),
    (
        ["experience.refill={}", "experience.replay={keep_no_signal: true}"],
        "keep_no_signal = True: keeps the groups that experience.refill replaces",
    ),
    *(
        ([f"algorithm.preset={preset}", *more, "experience.refill={}"], "replaces no group", "remove it")
        for preset, more in (("reinforce_pp", []), ("logit_distillation", ["model.teacher=base"]))
    ),
    *(
        (
            ["regime.sync_interval=8", *more, f"experience.replay.max_staleness={limit}"],
            f"must be at least {least}",
            "8",
        )
        for more, limit, least in (([], 5, 6), (["training.steps=20"], 6, 7), ([*TWICE, "training.steps=99"], 14, 15))
    ),
    *(
        ([*more, "rollout.oversample=2"], f"rollout.oversample = 2: does not work with {other}")
        for other, more in (
            ("task.agent", AGENT),
            ("rollout.engine", [ENGINE]),
            ("experience.store", [STORE]),
        )
    ),
    (["regime.offline=true", "experience.replay.max_staleness=5"], "must be at least 6", "regime.offline"),
    (
        ["regime.sync_interval=4", "experience.replay={}", "regime.max_mean_staleness=2"],
        "regime.max_mean_staleness = 2.0: must be at least 3",
        "regime.sync_interval = 4",
    ),
    ("regime.max_mean_staleness=2", "max_mean_staleness = 2.0: applies only with regime.mode = async or experience.fo"),
    (
        [*ASYNC, "regime.sync_interval=2", "regime.max_mean_staleness=0.5"],
        "max_mean_staleness = 0.5: must be at least 1",
    ),
    ([*FOLLOW, "regime.max_mean_staleness=1"], "max_mean_staleness = 1.0: must be at least training.checkpoint_every"),
    (
        "experience.replay={order: highest}",
        "replay.order = 'highest': has nothing to order by",
        "set experience.replay",
    ),
    *(
        (
            [
                *FOLLOW,
                "algorithm.preset=red_weight",
                "experience.missing_logprobs=unneeded",
                f"experience.replay={block}",
            ],
            f"experience.replay.{name}",
            "reads log-probs, which experience.missing_logprobs = unneeded removes",
        )
        for name, block in (("max_drift", "{max_drift: 0.01}"), ("priority", "{priority: headroom}"))
    ),
    *(
        ([*more, f"experience.replay.priority={kind}"], f"replay.priority = '{kind}': compares a group's", "use none")
        for kind, more in (
            ("reward_spread", ["algorithm.preset=reinforce_pp"]),
            ("reward_spread", ["algorithm.advantage={name: raw_reward}"]),
            ("absolute_advantage", TEMPLATE),
            ("absolute_advantage", ["algorithm.advantage={singleton: reward}", "rollout.group_size=1"]),
        )
    ),
    (["experience.refill={}", *ASYNC], "refill = {'batches': 10}: does not work with regime.mode = async"),
    (
        ["experience.record=true", "experience.missing_logprobs=initial"],
        "applies only with experience.store",
    ),
    (["experience.record=true", "experience.regrade=true"], "experience.regrade = True: applies only with"),
    ([STORE, "experience.record=true"], "experience.record = True: does not work with experience.store; remove one"),
    ([STORE, "experience.late.longest=2"], "experience.late = {", "does not work with experience.store"),
    ([STORE, "experience.mix={store: x}"], "experience.mix = {", "does not work with experience.store"),
    ([STORE, "experience.refill={}"], "experience.refill = {", "does not work with experience.store"),
    ([STORE, "experience.replay.max_reuse=2"], "experience.replay = {", "does not work with experience.store, except"),
    ([STORE, "regime.offline=true"], "regime.offline = True: does not work with experience.store"),
    ([STORE, "regime.sync_interval=2"], "regime.sync_interval = 2: does not work with experience.store"),
    ([STORE, "regime.sync_offset=1"], "regime.sync_offset = 1: does not work with experience.store"),
    # A followed store.
    ([*FOLLOW, "experience.store=null"], "follow = True: applies only with experience.store; set it"),
    (["experience.record=true", *FOLLOW[1:]], "experience.follow = True: applies only with experience.store; set it"),
    ([STORE, "experience.group_by=prompt"], "group_by = 'prompt': applies only with experience.follow; set it"),
    ([STORE, "experience.deadline_seconds=9"], "deadline_seconds = 9.0: applies only with experience.follow; set it"),
    ([STORE, "experience.outage_seconds=9"], "outage_seconds = 9.0: applies only with experience.follow; set it"),
    ([*FOLLOW, "regime.max_staleness=1"], "max_staleness = 1: must be at least training.checkpoint_every - 1 = 2"),
    ([*FOLLOW, "experience.replay={max_staleness: 1}"], "experience.replay.max_staleness = 1: must be at least"),
    (
        [*FOLLOW, "experience.replay={max_staleness: 2}", "training.updates_per_batch=2"],
        "experience.replay.max_staleness = 2: must be at least",
        "plus the other updates of its batch = 3",
    ),
    ([*FOLLOW, "experience.replay.draw_every=2"], "draw_every = 2: does not work with experience.follow"),
    ([*FOLLOW, "regime.sync_interval=3"], "regime.sync_interval = 3: does not work with experience.store"),
    ([*FOLLOW, "experience.missing_logprobs=initial"], "missing_logprobs = 'initial'", "use current or unneeded"),
    (FOLLOW[:2], "rollout.max_context_tokens = None: is required with experience.follow"),
    ([*FOLLOW, "rollout.group_size=1"], "rollout.group_size = 1", "is always 0"),
    # Training and evaluation.
    ("optimizer.state=new", "optimizer.state = 'new': applies only with model.run; set it, or remove this key"),
    ("optimizer.schedule={name: cosine}", "schedule.name = 'cosine': is no schedule of optax; takes one of constant_"),
    (
        "optimizer.schedule={name: cosine_decay_schedule, alhpa: 1}",
        "optimizer.schedule.alhpa = 1: is no argument of cosine_decay_schedule, which takes init_value",
        "did you mean 'alpha'?",
    ),
    (
        "optimizer.schedule={name: cosine_decay_schedule, alpha: low}",
        "optimizer.schedule.alpha = 'low': takes a float",
    ),
    (
        "optimizer.schedule={name: cosine_decay_schedule, init_value: 0.5}",
        "optimizer.learning_rate = 0.01: cosine_decay_schedule has its own peak; set only one of the two",
    ),
    (
        ["optimizer.schedule={name: warmup_cosine_decay_schedule, init_value: 0.0}", "optimizer.warmup_steps=2"],
        "optimizer.warmup_steps = 2: warmup_cosine_decay_schedule has its own warm-up; remove one of them",
    ),
    (
        "optimizer.schedule={name: exponential_decay}",
        "optimizer.schedule = {'name': 'exponential_decay'}: exponential_decay needs decay_rate too",
    ),
    (
        "optimizer.schedule={name: cosine_decay_schedule, decay_steps: 0}",
        "optimizer.schedule = {'name': 'cosine_decay_schedule', 'decay_steps': 0}: optax refuses it: ValueError",
    ),
    ("optimizer.warmup_steps=7", "optimizer.warmup_steps = 7", "must be below training.steps = 7"),
    ("training.micro_batch_prompts=3", "training.micro_batch_prompts = 3", "rollout.prompts_per_step = 4"),
    ("training.updates_per_batch=0", "training.updates_per_batch = 0: takes an integer, 1 or more"),
    ("training.minibatches=3", "training.minibatches = 3: must divide rollout.prompts_per_step = 4"),
    (
        "training={minibatches: 2, micro_batch_prompts: 4}",
        "training.micro_batch_prompts = 4: must divide the 2 prompts of a minibatch",
    ),
    (
        ["training.minibatches=2", "algorithm.advantage={name: 'tests.algorithms.mine:by_entropy'}"],
        "training.minibatches = 2: does not work with an advantage that reads scored log-probs or entropies",
    ),
    (
        ["training.minibatches=4", "experience.replay={max_staleness: 2}"],
        "experience.replay.max_staleness = 2: must be at least 3",
    ),
    (
        "training={micro_batch_prompts: 2, tokens_per_micro_batch: 512}",
        "training.micro_batch_prompts = 2: does not work with training.tokens_per_micro_batch; remove one of them",
    ),
    ("training.profile_steps=[0, 2]", "training.profile_steps = [0, 2]", "1 <= first", "or null"),
    ("training.profile_steps=[4, 3]", "training.profile_steps = [4, 3]", "first <= last"),
    ("training.profile_steps=[3, 8]", "training.profile_steps = [3, 8]", "training.steps = 7"),
    ("training.profile_steps=[3]", "training.profile_steps = [3]", "takes [first, last]"),
    *(
        (["evaluation.temperature=0", f"evaluation.{key}"], f"evaluation.{key.split('=')[0]} = ", "temperature above 0")
        for key in ("initial_kl=true", "samples=8", "top_k=3", "top_p=0.9", "min_p=0.1")
    ),
    # Algorithm.
    ("rollout.group_size=1", "rollout.group_size = 1", "group_mean is always 0", "raw_reward"),
    *(
        ([f"algorithm.preset={preset}", "rollout.group_size=1"], "rollout.group_size = 1", "is always 0 for a group's")
        for preset in ("reinforce_pp_baseline", "lite_ppo", "opo", "gpg", "maxrl", "oapl", "pairwise_consistency")
    ),
    *(
        ([f"algorithm.advantage={{name: {name}}}", "rollout.group_size=1"], f"{name} is always 0 for a group's only")
        for name in ("batch_whitened", "part_normalized", "log_mean_exp", "discounted")
    ),
    (
        ["algorithm.preset=reinforce_pp", "rollout={group_size: 1, prompts_per_step: 1}"],
        "rollout.prompts_per_step = 1: batch_whitened is always 0 for a batch's only completion",
    ),
    (
        [*TEMPLATE, "task.teacher_template={better}{prompt}", "rollout.group_size=1"],
        "task.teacher_template = '{better}{prompt}': names {better}",
        "raise rollout.group_size",
    ),
    ("algorithm.preset=rec_one_sided_nois", "algorithm.preset", "rec_one_sided_nois", "rec_one_side_nois"),
    ("algorithm.clip.epsilon_lo=0.3", "algorithm.clip.epsilon_lo", "0.3", "epsilon_low"),
    ("algorithm.clip.outer_low=0.3", "outer_low", "0.3", "one_side"),
    ("algorithm.weight.temperature=2.0", "temperature", "2.0"),
    ("algorithm.clip.name=oneside", "oneside", "one_side"),
    ("algorithm.clip.epsilon_low=wide", "epsilon_low", "wide"),
    (
        ["algorithm.preset=gdpo", "task.truncated=penalize"],
        "task.truncated = 'penalize': replaces rewards, but this algorithm's advantage reads the rewards' parts",
    ),
    (
        [*AGENT, "algorithm.preset=gdpo", "task.agent_failure_reward=-1"],
        "task.agent_failure_reward = -1.0: has no effect",
        "reads the rewards' parts, which a failed agent has not",
    ),
    ("task.reward_weights={turns: -1}", "task.reward_weights", "weighs the part 'turns'", "only with task.agent"),
    ("task.reward_weights={overlong: 2}", "weighs the part 'overlong'", "only with task.overlong_tokens"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The tiny run's file."""
    path = tmp_path_factory.mktemp("refusals") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(("overrides", "parts"), [(case[0], case[1:]) for case in CASES], ids=str)
def test_refusals_name_key_value_and_remedy(path, overrides, parts):
    with pytest.raises(ValueError) as error:
        load_config(path, [overrides] if isinstance(overrides, str) else overrides)
    for part in parts:
        assert part in str(error.value)


def refusal(path, *overrides) -> UserError:
    """The error of a config of the tiny run with these overrides."""
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return error.value


@pytest.mark.parametrize(
    ("overrides", "where", "value", "problem", "remedy"),
    [
        (
            ["rollout.drift.weights=int8", STORE],
            "rollout.drift",
            {"weights": "int8", "group": None, "fixed": False, "scale": 1.0, "logprobs": "sampled"},
            "changes the weights of recjax's own sampler, which this run does not use",
            "remove it",
        ),
        (
            ["evaluation={temperature: 0, samples: 8}"],
            "evaluation.samples",
            8,
            "applies only with evaluation.temperature above 0 or task.agent",
            "set one of them, or remove this key",
        ),
        (
            ["task.truncated=penalise"],
            "override 'task.truncated=penalise': task.truncated",
            "penalise",
            "takes train, mask, penalize",
            "did you mean 'penalize'?",
        ),
        (
            ["seed=${x}"],
            "override 'seed=${x}': seed",
            "${x}",
            "${…} is not replaced",
            "write the value itself, or \\${ where these characters are meant",
        ),
    ],
)
def test_a_refusal_has_its_parts(path, overrides, where, value, problem, remedy):
    error = refusal(path, *overrides)
    assert (error.where, error.value, error.problem, error.remedy) == (where, value, problem, remedy)


def test_a_contradiction_names_the_sources_of_its_keys(path):
    error = refusal(path, "training.minibatches=3")
    assert error.where == "training.minibatches"
    assert f"(rollout.prompts_per_step is from {path}, training.minibatches is from override" in error.problem


def test_a_fault_in_a_check_is_no_user_error(path, monkeypatch):
    def broken(self, config):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(MeshConfig, "check", broken)
    with pytest.raises(ValueError, match="^operands could not be broadcast together$") as error:
        load_config(path)
    assert not isinstance(error.value, UserError)


WORDS = {"Only": "applies only with", "Not": "does not work with", "Required": "is required with", "Must": "must"}
NOTE = re.compile(r"(Only|Not|Required|Must)(?: with)? (.*?)\.(?= |$)")


def noted() -> list[tuple[str, str]]:
    """A key and the beginning of its refusal, for each relation to other keys that the documentation states."""
    found = []
    for key, field in KEYS.items():
        note = field.json_schema_extra["note"]
        assert NOTE.sub("", note).strip() == "", f"a note of {key} that no test reads"
        for kind, conditions in NOTE.findall(note):
            each = conditions.split(" or ") if kind == "Not" else [conditions]
            found += [(key, f"{WORDS[kind]} {condition}") for condition in each]
    return found


@pytest.mark.slow
def test_every_documented_relation_is_in_the_table(path):
    texts = []
    for overrides, *_ in CASES:
        texts.append(str(refusal(path, *([overrides] if isinstance(overrides, str) else overrides))))
    missing = []
    for key, problem in noted():
        if not any(text.startswith(f"{key} = ") and f": {problem}" in text for text in texts):
            missing.append(f"{key}: {problem}")
    assert not missing


def test_each_value_that_is_refused_has_its_line(path):
    with pytest.raises(ValueError) as error:
        load_config(path, ["training.steps=-1", "optimizer.beta1=2", "seed=-1"])
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("override ") for line in lines)
