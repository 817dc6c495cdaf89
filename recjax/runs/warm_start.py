"""Supervised training before a run: on answers, some of them deliberately wrong; demonstrations are only read here."""

import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from recjax import __version__
from recjax.agents.trajectory import Trajectory
from recjax.config import Config, OptimizerConfig, WarmStartConfig
from recjax.errors import UserError
from recjax.experience.batch import Shape
from recjax.experience.group import Completion, Grade, Group, Turn
from recjax.hub.chat_rendering import CHAT_DATE, reads_variable, render_chats, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded, encode_after
from recjax.logs.metrics import step_bar
from recjax.models.decoder import Decoder
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.models.placement import constrain_params, put_rows
from recjax.models.trainable import fingerprint
from recjax.rollout.requests import Sampled
from recjax.runtime import hosts
from recjax.runtime.cache import cache_folder
from recjax.runtime.files import check_manifest, locked_file, short_error, write_manifest
from recjax.runtime.literal_path import LiteralPath
from recjax.sources.setup import Demonstrations
from recjax.tasks.problems import REASONING_KEYS, checked_messages, messages_in
from recjax.tasks.prompts import Prompts, prompts_digest
from recjax.tasks.reading import FileRow, read_data, template_of
from recjax.training.update import first_state, make_optimizer

logger = logging.getLogger(__name__)

FOLDER = "warm_start"  # in the run folder: metrics.jsonl and checkpoints/ of the stage on demonstrations

_MOST_HELD_OUT = 256  # demonstrations held out without a file of held-out demonstrations


def warm_start(config: Config, policy: Policy, params: dict, prompts: Prompts) -> dict:
    """The parameters after the warm start, from the cache if an equal warm start is there.

    The cache is $RECJAX_CACHE, or ~/.cache/recjax. Its key covers everything that the result depends on except the
    mesh, which affects rounding. Damaged entries are made again. Runs with several processes do not use the cache.

    Raises:
        UserError: the cache cannot be written.
    """
    assert config.warm_start is not None
    if jax.process_count() > 1:
        return supervise(config.warm_start, policy, params, prompts, config.seed_of_base)
    digest = _base_policy_digest(config, policy, params, prompts)
    folder = cache_folder("warm_start") / digest
    # If several runs need the same base policy at once, one run makes it while the other runs wait.
    with locked_file(Path(f"{folder}.lock")), ocp.StandardCheckpointer() as checkpointer:
        is_whole = folder.exists()
        try:
            if is_whole:
                check_manifest(folder)
        except UserError as error:
            logger.warning("base policy in the cache: %s; recjax makes it again", error)
            is_whole = False
        if is_whole:
            logger.info("base policy from the cache: %s", folder)
            return checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, params))
        params = supervise(config.warm_start, policy, params, prompts, config.seed_of_base)
        for leftover in folder.parent.glob(f"{digest}*"):
            if leftover.is_dir():  # damaged, or left by a killed process
                shutil.rmtree(leftover)
        try:
            checkpointer.save(LiteralPath(folder), params)
            checkpointer.wait_until_finished()
            write_manifest(folder)
        except Exception as error:
            # Tensorstore raises its own exception types, for example for a full disk.
            raise UserError(
                folder,
                f"the base policy cannot be written to the cache ({short_error(error)})",
                "free space there, or set RECJAX_CACHE to another folder",
            ) from error
    logger.info("base policy written to the cache: %s", folder)
    return params


def _base_policy_digest(config: Config, policy: Policy, params: dict, prompts: Prompts) -> str:
    """A digest of everything that the result of a warm start depends on, apart from the mesh."""
    values = config.model_dump()
    model = values["model"]
    for key in ("lora", "freeze", "chat_date", "teacher_rate"):
        del model[key]
    if not config.model.chat_template_kwargs:
        del model["chat_template_kwargs"]
    model["teacher"] = None  # Runs with and without a teacher start from the same base policy.
    task = {key: value for key, value in values["task"].items() if not key.startswith("teacher_")}
    # Paths in the config are only names: files of problems and models may change under them.
    mistakes = repr([problem.mistakes for problem in prompts.problems])
    depends_on = {
        "seed": config.seed_of_base,
        "model": model,
        "task": task,
        "warm_start": values["warm_start"],
        "problems": [prompts_digest(prompts), hashlib.sha256(mistakes.encode()).hexdigest()],
        "weights": fingerprint(params),
        "version": __version__,
        "backend": jax.default_backend(),
    }
    # Only policies whose chat templates set these values have the keys, so the digests of other policies stay the same.
    chat_date = policy.tokenizer.init_kwargs.get(CHAT_DATE)
    if chat_date is not None:
        depends_on[CHAT_DATE] = chat_date
    end = turn_end(policy.tokenizer)
    if end is not None:
        depends_on["turn_end"] = end
    content = json.dumps(depends_on, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def supervise(config: WarmStartConfig, policy: Policy, params: dict, prompts: Prompts, seed: int) -> dict:
    """Trains on (prompt, answer) pairs; after a share `right_first` of the steps, a share `wrong_fraction` is wrong.

    The learning rate falls to 0 as a cosine; the gradient's global norm is clipped at 1.
    A wrong answer is one of its problem's mistakes, or has one token replaced if its problem has no mistakes.
    """
    optimizer = make_optimizer(OptimizerConfig())
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    rates = np.asarray(schedule(np.arange(config.steps)))
    optimizer_state = first_state(optimizer, params).optimizer_state
    problems = prompts.problems
    # Rows of `tokens`: the answer to each problem, then the mistakes of the first problem, of the second, and so on.
    texts = list(prompts.answers)
    are_chats = [not isinstance(problem.prompt, str) for problem in problems]
    for problem in problems:
        texts += problem.mistakes
        are_chats += [not isinstance(problem.prompt, str)] * len(problem.mistakes)
    tokens, mask = _demonstrations(policy, texts, are_chats)
    counts = np.array([len(problem.mistakes) for problem in problems])
    first_mistake = len(problems) + np.cumsum(counts) - counts
    generator = np.random.default_rng([seed, 2])
    with step_bar("warm start", config.steps) as bar:
        for step, rate in enumerate(rates):
            wrong_fraction = 0.0
            if step >= config.right_first * config.steps:
                wrong_fraction = config.wrong_fraction
            chosen = generator.integers(len(problems), size=config.batch_size)
            is_wrong = generator.random(config.batch_size) < wrong_fraction
            has_mistakes = counts[chosen] > 0
            rows = chosen
            if counts.any():
                mistakes = first_mistake[chosen] + generator.integers(np.maximum(counts[chosen], 1))
                rows = np.where(is_wrong & has_mistakes, mistakes, chosen)
            shown = tokens[rows]
            if not counts.all():
                shown = _with_slips(shown, mask[rows], is_wrong & ~has_mistakes, generator)
            batch = put_rows((prompts.tokens[chosen], prompts.mask[chosen], shown, mask[rows]))
            params, optimizer_state, loss = _supervised_step(
                policy.decoder, optimizer, params, optimizer_state, batch=batch, learning_rate=rate
            )
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    return params


def _demonstrations(policy: Policy, answers: list[str], are_chats: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask of the answers, each with an end token: the chat template's in chats, else the stop token."""
    stop_token = policy.stop_ids[0]
    end_of_turn = turn_end(policy.tokenizer)
    if end_of_turn is None:
        end_of_turn = stop_token
    pairs = list(zip(answers, are_chats, strict=True))
    encoded = {}
    for answer, is_chat in dict.fromkeys(pairs):  # many problems share an answer
        ids = encode_after(policy.tokenizer, (), answer, "answer")
        if is_chat:
            ids = [*ids, end_of_turn]
        else:
            ids = [*ids, stop_token]
        check_embedded(policy.tokenizer, ids, policy.vocabulary, f"warm_start: answer {answer!r:.80} with its end")
        encoded[answer, is_chat] = ids
    rows = [encoded[pair] for pair in pairs]
    lengths = np.array([len(ids) for ids in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def _with_slips(
    tokens: np.ndarray, mask: np.ndarray, is_wrong: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The answers, those in `is_wrong` with one token, never the last, replaced by another token of the answers.

    An answer without tokens stays; all answers stay if they have only one distinct token.
    """
    has_successor = mask[:, 1:]
    known = np.unique(tokens[:, :-1][has_successor])  # distinct tokens, without the last ones of answers
    if len(known) < 2:
        return tokens
    lengths = mask.sum(-1)
    wrong = np.flatnonzero(is_wrong & (lengths > 1))
    slip = generator.integers(lengths[wrong] - 1)  # position of the replaced token in each wrong answer
    index = np.searchsorted(known, tokens[wrong, slip])
    shift = generator.integers(1, len(known), len(wrong))  # never 0, so the token becomes another one
    slipped = tokens.copy()
    slipped[wrong, slip] = known[(index + shift) % len(known)]
    return slipped


@functools.partial(jax.jit, static_argnames=("decoder", "optimizer"), donate_argnames=("optimizer_state",))
def _supervised_step(decoder: Decoder, optimizer, params, optimizer_state, batch, learning_rate):
    prompts, prompt_mask, completions, completion_mask = batch

    def cross_entropy(params):
        scores = completion_logprobs(
            decoder,
            params,
            prompts,
            prompt_mask,
            completions=completions,
            completion_mask=completion_mask,
            sampling=Sampling(),
            chunk=1024,
        )
        return -jnp.sum(jnp.where(completion_mask, scores.logprobs, 0.0)) / completion_mask.sum()

    loss, gradient = jax.value_and_grad(cross_entropy)(params)
    updates, optimizer_state = optimizer.update(
        gradient, optimizer_state, params, learning_rate=learning_rate, clip_norm=1.0
    )
    params = optax.apply_updates(params, updates)
    params, optimizer_state = constrain_params((params, optimizer_state))
    return params, optimizer_state, loss


def load_demonstrations(config: Config, policy: Policy) -> Demonstrations | None:
    """Reads and tokenizes the chats of `warm_start.demonstrations`; None if the key is not set.

    All processes of a run must call it, and share the work.

    Raises:
        UserError: a file cannot be read, or a chat cannot be trained on; the message has file, line and reason.
    """
    if not config.demonstrations:
        return None
    settings = config.warm_start
    assert settings is not None and settings.demonstrations is not None
    chats = _tokenized(settings.demonstrations, "warm_start.demonstrations", "train", policy, settings.max_tokens)
    if settings.held_out is not None:
        train = chats
        held_out = _tokenized(settings.held_out, "warm_start.held_out", "test", policy, settings.max_tokens)
    else:
        order = np.random.default_rng([config.seed, 8]).permutation(len(chats)).tolist()
        count = min(len(chats) // 10, _MOST_HELD_OUT)
        train = [chats[index] for index in sorted(order[count:])]
        held_out = [chats[index] for index in sorted(order[:count])]
    digest = hashlib.sha256()
    longest = 0
    for group in (*train, *held_out):
        for row in group.completions[0].rows:
            for array in (row.prompt_tokens, row.tokens, row.mask):
                digest.update(len(array).to_bytes(8, "little") + array.tobytes())
            longest = max(longest, len(row.prompt_tokens) + len(row.tokens) - 1)
    shape = Shape(prompts=settings.batch_size, group=None, prompt_time=longest, time=longest)
    return Demonstrations(train, held_out, shape, digest.hexdigest())


def _tokenized(path: str, key: str, split: str, policy: Policy, max_tokens: int | None) -> list[Group]:
    """The chats of a file, folder or pattern as groups, without chats of more than `max_tokens` tokens."""

    def tokenize(rows: Sequence[FileRow], _: int) -> list[Group]:
        return [demonstration(row, policy) for row in rows]

    groups = hosts.shared_out(tokenize, read_data(path, key, split))
    if max_tokens is None:
        return groups
    lengths = []
    for group in groups:
        rows = group.completions[0].rows
        lengths.append(max(len(row.prompt_tokens) + len(row.tokens) for row in rows))
    kept = [group for group, length in zip(groups, lengths, strict=True) if length <= max_tokens]
    if not kept:
        raise UserError(
            "warm_start.max_tokens", f"the shortest chat of {path} has {min(lengths)}", "raise it", value=max_tokens
        )
    if len(kept) < len(groups):
        logger.info(
            "%s: skipping %d of %d chats: more than %d tokens", key, len(groups) - len(kept), len(groups), max_tokens
        )
    return kept


def demonstration(row: FileRow, policy: Policy) -> Group:
    """Tokenizes a chat; the mask is True at the tokens of every assistant turn, with the token that ends the turn.

    Every turn has the tokens that the policy would sample after its prompt: no token spans their boundary. Turns join
    one row as those of agents do: a turn begins another row if the template drops text of earlier turns.

    Args:
        row: row of a file with a column `messages`, and maybe `tools` and `chat_template_kwargs`.
    Raises:
        UserError: the chat has other roles or an odd order, or the chat template does not write it as the policy would
            reply; the message has file, line and reason.
    """
    variables = template_of(row)
    tokenizer = policy.tokenizer
    try:
        messages = _demonstrated(messages_in(row.values.get("messages")))
        trajectory = Trajectory(tokenizer)
        if "tools" in variables and not reads_variable(tokenizer, "tools"):
            raise UserError("tools", "the chat template reads no tools", "remove them, or take a model for tools")
        if any(message.get("tool_calls") for message in messages) and not reads_variable(tokenizer, "tool_calls"):
            raise UserError("tool_calls", "the chat template writes none", "take a model for tools, or remove the chat")
        end = turn_end(tokenizer)
        if end is None:
            ending = ""
            last = policy.stop_ids[0]
        else:
            ending = str(tokenizer.convert_ids_to_tokens(end))
            last = end
        trained = []  # indices of the assistant's messages to train on
        for index, message in enumerate(messages):
            # OpenAI's `weight` and axolotl's `train` exclude a turn, which stays part of later prompts.
            is_included = message.get("weight", 1) and message.get("train", True)
            if message["role"] == "assistant" and is_included:
                trained.append(index)
        if not trained:
            raise UserError("messages", "no assistant's message has a weight above 0", "give one, or remove the chat")
        repeated = [variables] * len(trained)
        prompts = render_chats(tokenizer, [messages[:index] for index in trained], variables=repeated)
        replied_chats = [messages[: index + 1] for index in trained]
        texts = render_chats(tokenizer, replied_chats, variables=repeated, asks=False)
        reply = ""
        for index, prompt, text in zip(trained, prompts, texts, strict=True):
            reply = text[len(prompt) :]
            has_end = True
            if ending:
                has_end = ending in reply
                reply = reply.rpartition(ending)[0]
            if not (text.startswith(prompt) and has_end):
                raise UserError(
                    f"message {index}",
                    "the chat template writes no reply, with an end, after its prompt for this turn",
                    "remove the chat, or take a model whose template does",
                )
            unwritten = _unwritten(messages[index], text, len(prompt))
            if unwritten:
                raise UserError(
                    f"message {index}",
                    f"the chat template does not write {unwritten}, so the policy would learn to leave it out",
                    "move it into the content, remove it, or take a model whose template writes it",
                )
            ids = trajectory.tokens_of(prompt, rendered=True)
            tokens = np.array([*encode_after(tokenizer, ids, reply, "reply"), last], np.int32)
            sampled = Sampled(
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
                versions=np.zeros_like(tokens),
                truncated=False,
            )
            trajectory.add(ids, sampled, prompt)
        for row_part in trajectory.rows:
            check_embedded(tokenizer, np.append(row_part.prompt_tokens, row_part.tokens), policy.vocabulary, "messages")
    except UserError as error:
        raise error.within(row.location) from error
    rows = tuple(row_part._replace(behavior_logprobs=None) for row_part in trajectory.rows)
    completion = Completion(
        id=row.location,
        source="demonstrations",
        text=reply,
        rows=rows,
        sampling=None,
        policy_version=None,
        truncated=False,
        grade=Grade(1.0),
        turns=tuple(Turn(number, end_in_row) for number, end_in_row in trajectory.ends),
    )
    return Group(row.location, rows[0].prompt_tokens, (completion,), messages)


def _unwritten(message: Mapping[str, Any], text: str, prompt: int) -> str | None:
    """What a chat template leaves out of an assistant's turn: its content, its reasoning, or the name of a tool call.

    Line ends and spaces do not count. The prompt for the turn may hold the beginning, such as an empty think block.

    Args:
        text: the rendered chat, up to the end of this turn.
        prompt: number of characters of `text` that ask for the turn.
    """
    parts = {name: message.get(name) for name in ("content", *REASONING_KEYS)}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        calls = []
    for call in calls:
        name = None
        if isinstance(call, Mapping):
            function = call.get("function", call)
            if isinstance(function, Mapping):
                name = function.get("name")
        parts[f"the tool call {name!r}"] = name
    before = "".join(text[:prompt].split())
    reply = "".join(text[prompt:].split())
    for name, content in parts.items():
        if isinstance(content, str):
            squeezed = "".join(content.split())
            if squeezed and squeezed not in before[-len(squeezed) :] + reply:
                return name
    return None


_AFTER = {  # roles that a message may follow; None is the beginning of the chat
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _demonstrated(messages: Any) -> list[dict[str, Any]]:
    """The messages of a row, in an order in which the assistant replies."""
    messages = checked_messages(messages, "messages")
    before = None
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _AFTER:
            raise UserError(f"message {index}: role", f"takes {', '.join(_AFTER)}", value=role)
        for name in ("weight", "train"):
            if message.get(name) not in (None, 0, 1):
                raise UserError(f"message {index}: {name}", "takes 0 (excluded) and 1", value=message[name])
        if before not in _AFTER[role]:
            where = "begins the chat"
            if before:
                where = f"follows a message of role {before}"
            raise UserError(f"message {index}: role", f"it {where}", "correct the order of the messages", value=role)
        before = role
    if before != "assistant":
        raise UserError(f"message {len(messages) - 1}: role", "the last message must be the assistant's", value=before)
    return messages
