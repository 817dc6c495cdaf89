"""Models, stores and runs that the configs of the array name; each is made when a config first names it."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from recjax.config import Config, make_config
from recjax.experience.records import Record
from recjax.hub.export import export_model, write_base
from recjax.hub.tokenizers import character_tokenizer
from recjax.hub.weights import read_config
from recjax.models.decoder_config import DecoderConfig
from tests.experience.rows import append, read
from tests.pairs.features import BASE
from tests.tiny import params_of
from tests.training.tiny_run import train

TOKENIZER = character_tokenizer("0123456789+=")
TOKENIZER.chat_template = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}"
    "{{ m.content | default('', true) }}{% if m.tool_calls %}+{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}={% endfor %}"
)
DENSE = DecoderConfig(len(TOKENIZER), 16, 32, 1, 2, 1, 8)
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": TOKENIZER.eos_token_id,
}
EXPERTS = SIZES | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
DELTA = SIZES | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, config: DecoderConfig, seed: int, fields: dict | None = None) -> None:
    """Writes a model folder with random weights.

    Args:
        fields: content of config.json; None for a plain Llama decoder.
    """
    base = folder.parent / f"{folder.name}-base"
    base.mkdir(parents=True)
    if fields is None:
        write_base(base, config, TOKENIZER, (TOKENIZER.eos_token_id,))
    else:
        (base / "config.json").write_text(json.dumps(fields))
        TOKENIZER.save_pretrained(base)
        config = read_config(base)
    export_model(folder, config, jax.device_get(params_of(config, seed)), base)


def _with(record: Record, **changes: Any) -> Record:
    """A record with other fields of its completion."""
    completion = record.completion._replace(**changes)
    return record._replace(group=record.group._replace(completions=(completion,)), number=0)


def uneven(records: Sequence[Record]) -> list[Record]:
    """Records without some completions, so that groups have two to four of four."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group.id, []).append(_with(record))
    kept = [group[number % 3 :] for number, group in enumerate(groups.values())]
    return list(itertools.chain.from_iterable(kept))


class Materials:
    """Files under one folder, made by name when a config first needs them."""

    def __init__(self, folder: Path):
        """Takes the folder."""
        self.folder = folder
        self._makers: dict[str, Callable[[Path], None]] = {
            "dense": lambda path: write_model(path, DENSE, 0),
            "tied": lambda path: write_model(path, dataclasses.replace(DENSE, tie_embeddings=True), 1),
            "experts": lambda path: write_model(path, DENSE, 2, EXPERTS),
            "delta": lambda path: write_model(path, DENSE, 3, DELTA),
            "teacher": lambda path: write_model(path, DENSE, 4),
            "expert_teacher": lambda path: write_model(path, DENSE, 6, EXPERTS),
            "delta_teacher": lambda path: write_model(path, DENSE, 5, DELTA),
            "parent": self._make_parent,
            "store": self._make_store,
            "initial": self._make_initial,
            "uneven": self._make_uneven,
            "foreign": self._make_foreign,
            "recorded_turns": self._make_recorded_turns,
            "trajectories": self._make_trajectories,
            "chats.jsonl": self._make_chats,
        }

    def __getitem__(self, name: str) -> str:
        """The path of a file or folder."""
        path = self.folder / name
        if not path.exists():
            self._makers[name](path)
        return f"{path}/experience.db" if name in ("store", "recorded_turns") else str(path)

    def config(self, *options: str) -> Config:
        """The base config with options, in which `<name>` stands for the path of a material."""
        return make_config(BASE, [self.filled(option) for option in options])

    def filled(self, option: str) -> str:
        """An option with paths in place of `<name>`."""
        for name in self._makers:
            if f"<{name}>" in option:
                option = option.replace(f"<{name}>", self[name])
        return option.replace("<server>", "127.0.0.1:1")  # `running.served` starts it

    def _make_parent(self, path: Path) -> None:
        # With an average, which a run that continues it may have as well, or not.
        average = ["model.teacher=policy", "model.teacher_rate=0.5", "algorithm.teacher_divergence={coefficient: 0.5}"]
        train(self.config("model.path=<dense>", f"output={path}", *average, "training.steps=2", "seed=11"))

    def _make_store(self, path: Path) -> None:
        # Other weights than the run's, as many groups as replay and followed runs may ask for.
        options = ["experience.record=true", "training.steps=12", "optimizer.learning_rate=0", "seed=12"]
        options += ["rollout.recorded_top_k=4"]
        train(self.config("model.path=<teacher>", f"output={path}", *options))

    def _make_initial(self, path: Path) -> None:
        # As `recjax.generate_experience` writes them: one policy, before its first update.
        append(path, [_with(record, policy_version=0) for record in read(self["store"])])

    def _make_uneven(self, path: Path) -> None:
        append(path, uneven(read(self["store"])))

    def _make_foreign(self, path: Path) -> None:
        unknown = {"source": "expert", "policy_version": None, "sampling": None}
        records = []
        for record in read(self["store"]):
            rows = tuple(row._replace(behavior_logprobs=None) for row in record.completion.rows)
            records.append(_with(record, rows=rows, **unknown))
        append(path, records)

    def _make_trajectories(self, path: Path) -> None:
        append(path, uneven(read(self["recorded_turns"])))

    def _make_recorded_turns(self, path: Path) -> None:
        options = ["experience.record=true", "training.steps=6", "optimizer.learning_rate=0", "seed=13"]
        options += ["rollout.recorded_top_k=4"]
        agent = ["task.agent=tests.pairs.programs:either", "rollout.max_context_tokens=32"]
        train(self.config("model.path=<teacher>", f"output={path}", *options, *agent))

    def _make_chats(self, path: Path) -> None:
        chats = [
            {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]}
            for a in range(1, 9)
            for b in range(1, 4)
        ]
        path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
