"""The engine: the reference's completions whatever the slots, requests at any time, and few programs for it."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from recjax.errors import UserError
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.models import unrolling
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.models.rotary import RopeScaling
from recjax.models.sampling import TokenRecord
from recjax.rollout import collecting, decoding, keys_values, plan
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts, encode_problems
from tests.closeness import assert_same_logprobs
from tests.hub.test_tokenizers import sentencepiece_like
from tests.marks import campaign, campaign_except, slow
from tests.rollout.across_versions import logprobs_across
from tests.rollout.padded import sample_completions
from tests.rollout.reference_sampler import sample
from tests.tiny import params_of

SIZES = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4}
PLAIN = DecoderConfig(**SIZES, num_kv_heads=2, head_dim=4, tie_embeddings=False)
WINDOWED = DecoderConfig(
    **SIZES,
    num_kv_heads=1,
    head_dim=6,
    windows=(3, None),
    rope_layers=(True, False),
    local_rope_theta=20.0,
    rope_scaling=RopeScaling("linear", 3.0),
    norm_offset=1.0,
    post_norms=True,
    qk_norm=True,
    attention_cap=1.5,
    logit_cap=3.0,
)
LENGTHS = (3, 5, 1, 4)
LATE, EARLY = (7,), (1, 4, 11, 13, 17, 20, 21)
AT_ONCE = tuple(range(23))
MAX_TOKENS = 24
PLAIN_SAMPLING = Sampling()


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Rounds of 5 tokens, caches from 16, slots from 5, blocks of 4: a short completion takes several of them."""
    for name, value in {"ROUND": 5, "SHORTEST_CACHE": 16, "FEWEST_SLOTS": 5}.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(decoding, "BLOCK", 4)
    monkeypatch.setattr(unrolling, "LEAST_WEIGHTS", 0)


@functools.cache
def problem(config):
    """A decoder, its parameters, prompts and their mask, which no test changes."""
    params = params_of(config)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.random.default_rng(0).integers(0, 23, mask.shape).astype(np.int32)
    return Decoder(config), params, np.where(mask, tokens, 0), mask


def engine_of(decoder, params, stop_ids=LATE, slots=None, version=0):
    engine = Engine(decoder, stop_ids, slots=slots, prefix_time=max(LENGTHS))
    engine.replace_weights(params, version)
    return engine


def assert_same(slots, config=PLAIN, group_size=3, stop_ids=LATE, **changes):
    options = {"max_tokens": MAX_TOKENS, "sampling": Sampling(), "group_size": group_size} | changes
    decoder, params, *asked = problem(config)
    key = jax.random.key(3)
    expected = jax.device_get(sample(decoder, params, *asked, key, **options, stop_ids=stop_ids))
    engine, keys = engine_of(decoder, params, stop_ids, slots, version=4), row_keys(key, len(expected.tokens))
    sampled = sample_completions(engine, *asked, keys, **options)
    assert len(sampled) == len(expected.tokens)
    for row, found in enumerate(sampled):
        kept = expected.mask[row]
        np.testing.assert_array_equal(found.tokens, expected.tokens[row][kept])
        assert_same_logprobs(found.logprobs, expected.logprobs[row][kept])
        assert found.truncated == expected.truncated[row]
        assert found.versions.tolist() == [4] * kept.sum()
    return sampled


@pytest.mark.parametrize("slots", campaign_except([None, 1, 5, 12, 40], 5, slow=[12]))
def test_any_number_of_slots_samples_the_same(slots):
    truncated = [found.truncated for found in assert_same(slots)]
    assert any(truncated) and not all(truncated)


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", campaign_except([True, False], False), ids=["unrolled", "scanned"])
def test_layers_that_differ(unrolled, monkeypatch):
    monkeypatch.setattr(unrolling, "MOST_WRITTEN_OUT", 2 if unrolled else 1)
    assert_same(5, WINDOWED)


def test_rotary_angles_are_computed_before_the_rounds_loop():
    decoder, params, prompts, mask = problem(PLAIN)
    options = {"decoder": decoder, "options": decoding.RoundOptions(PLAIN_SAMPLING, LATE, time=5)}
    keys, ones = row_keys(jax.random.key(3), len(prompts)), np.ones(len(prompts), np.int32)
    cache, _ = decoding.prefill(params, prompts, mask, decoder=decoder)
    empty = keys_values.empty(cache.keys_values, rows=len(prompts), time=5)
    memory = keys_values.Memory(cache.keys_values, empty)
    rows = decoding.SlotState(ones > 0, *[ones] * 5, keys)
    program = jax.make_jaxpr(functools.partial(decoding.decode, **options))(params, memory, rows, np.int32(0))
    assert cosines(program.jaxpr) == (0, 1)


def cosines(jaxpr, in_loop=False):
    """How many times cosines are taken, inside and outside of while loops."""
    found = np.zeros(2, int)
    for equation in jaxpr.eqns:
        found[0 if in_loop else 1] += equation.primitive.name == "cos"
        for inner in jaxprs_in_params(equation.params):
            found += cosines(inner, in_loop or equation.primitive.name == "while")
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("stop_ids", campaign_except([(), EARLY, AT_ONCE], EARLY), ids=["never", "early", "at once"])
def test_stops(stop_ids):
    sampled = assert_same(5, group_size=4, stop_ids=stop_ids)
    assert all(len(found.tokens) == 1 for found in sampled) == (len(stop_ids) == 23)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    campaign_except(
        [Sampling(0.0), Sampling(1.4, top_k=6), Sampling(0.7, top_p=0.8), Sampling(min_p=0.2)], Sampling(0.7, top_p=0.8)
    ),
    ids=["greedy", "top-k", "top-p", "min-p"],
)
def test_distributions(sampling):
    assert_same(5, sampling=sampling, group_size=1 if sampling.temperature == 0 else 5)


@pytest.mark.slow
@pytest.mark.parametrize("limits", campaign_except([(1, 5), (2, 5), (6, 5), (6, None), (1, None)], (1, 5)))
def test_short_limits(limits):
    max_tokens, slots = limits
    assert_same(slots, max_tokens=max_tokens)


@pytest.mark.slow
def test_batches_of_any_lengths_share_few_programs():
    decoder, params, prompts, mask = problem(PLAIN)
    programs = (
        decoding.prefill,
        decoding.first_tokens,
        decoding.decode,
        keys_values.gather_slots,
        keys_values.put_started,
    )

    def counts_after(keys):
        weights = params
        for key in keys:
            weights = jax.tree.map(lambda x: x * 1.01, weights)
            engine = engine_of(decoder, weights, (7, 9), 10)
            options = {"group_size": 3, "max_tokens": MAX_TOKENS, "sampling": Sampling()}
            sample_completions(
                engine, (prompts + key) % 23, mask, row_keys(jax.random.key(key), 3 * len(prompts)), **options
            )
        return [program._cache_size() for program in programs]

    for program in programs:
        program.clear_cache()
    first = counts_after(range(6))
    assert first[:2] == [1, 1] and first[2] <= 2 * 2  # two numbers of slots, two lengths
    assert counts_after(range(6)) == first
    most = [1, 1, 2 * 2, 3, 2 * 2]  # slots are halved once, and the cache stays as it is then or grows
    assert all(now <= limit for now, limit in zip(counts_after(range(8, 20)), most, strict=True))


def test_engines_that_record_nothing_share_their_programs():
    programs = (decoding.prefill, decoding.first_tokens, decoding.decode)
    options = {"group_size": 3, "max_tokens": 5, "sampling": PLAIN_SAMPLING}
    decoder, params, prompts, mask = problem(PLAIN)

    def entries_after(recording):
        engine = Engine(decoder, LATE, slots=None, prefix_time=max(LENGTHS), recording=recording)
        engine.replace_weights(params, 0)
        sample_completions(engine, prompts, mask, row_keys(jax.random.key(3), 3 * len(prompts)), **options)
        return [program._cache_size() for program in programs]

    # A run's evaluation records nothing, and its training samples would record sets if the distribution had cuts.
    assert entries_after(TokenRecord()) == entries_after(TokenRecord(kept_ids=128))


@pytest.fixture
def sizes(monkeypatch):
    """What is decoded and gathered from here on: (slots, tokens in the cache), and what it becomes where it changes."""
    found, decode, gathered = [], decoding.decode, keys_values.gather_slots

    def of(memory):
        return keys_values.cache_rows(memory.later), keys_values.cache_time(memory.later)

    def decoded(params, memory, *arguments, **options):
        found.append(of(memory))
        return decode(params, memory, *arguments, **options)

    def fewer(memory, order, *, time):
        found.append((*of(memory), len(order), time))
        return gathered(memory, order, time=time)

    monkeypatch.setattr(decoding, "decode", decoded)
    monkeypatch.setattr(keys_values, "gather_slots", fewer)
    return found


@pytest.mark.slow
def test_each_number_of_slots_has_one_cache_length(sizes):
    decoder, params, prompts, mask = problem(PLAIN)
    options = {"group_size": 10, "max_tokens": 40, "sampling": Sampling()}
    for key in range(8):
        engine, keys = engine_of(decoder, params, EARLY), row_keys(jax.random.key(key), 40)
        sampled = sample_completions(engine, prompts, mask, keys, **options)
        assert len({len(one.tokens) for one in sampled}) > 5
    decoded, gathered = ({size for size in sizes if len(size) == length} for length in (2, 4))
    assert decoded == {(40, 16), (20, 16), (10, 48), (5, 48)}
    assert gathered == {(40, 16, 20, 16), (20, 16, 10, 48), (10, 48, 5, 48)}
    assert_same(40, group_size=10, stop_ids=EARLY, max_tokens=40)


@pytest.mark.slow
def test_slots_of_ended_completions_are_halved_step_by_step(sizes):
    requests = requests_of(limits=[3] * 9 + [24], group_size=10)
    decoder, params, *_ = problem(PLAIN)
    engine = engine_of(decoder, params, ())
    tickets = engine.admit(requests, group_size=10)
    found = engine.drain()
    assert [size for size in sizes if len(size) > 2] == [(40, 16, 20, 16), (20, 16, 10, 32), (10, 32, 5, 32)]
    assert_completions([found[ticket] for ticket in tickets[9::10]], alone(requests[9::10], stop_ids=()))


@pytest.mark.slow
def test_a_policy_with_slots_samples_the_same():
    decoder, params, prompts, mask = problem(PLAIN)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstu")
    asked = Prompts(prompts, mask, [""] * 4, [Problem("a", "b")] * 4)
    policies = [Policy(decoder, tokenizer, LATE, slots) for slots in (None, 5)]
    keys, names = row_keys(jax.random.key(1), 12), {"name": "batch", "source": "policy", "version": 3}
    expected, found = (sample_groups(one, params, asked, keys, 3, MAX_TOKENS, Sampling(), **names) for one in policies)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            (row,), (its,) = mine.rows, theirs.rows
            np.testing.assert_array_equal(row.tokens, its.tokens)
            assert_same_logprobs(row.behavior_logprobs, its.behavior_logprobs)
            assert (mine.id, mine.text, mine.policy_version) == (theirs.id, theirs.text, 3)


def test_batch_texts_continue_where_their_prompts_end(monkeypatch):
    tokenizer = sentencepiece_like()
    tokens = [tokenizer.convert_tokens_to_ids(pieces) for pieces in (["▁42"], ["42"], ["4", "</s>"], ["▁Yes"])]
    kinds = np.float32, np.int32
    done = [Sampled(np.int32(ids), *(np.zeros(len(ids), kind) for kind in kinds), ids[-1] != 2) for ids in tokens]
    engine = mock.MagicMock(spec=Engine, admit=lambda *_: range(4), drain=lambda: dict(enumerate(done)))
    monkeypatch.setattr(collecting, "Engine", lambda *_, **__: engine)
    asked = encode_problems([Problem("x=", "4"), Problem("x", "4")], tokenizer, None)
    keys, names = row_keys(jax.random.key(1), 4), {"name": "batch", "source": "policy", "version": 3}
    policy = Policy(Decoder(PLAIN), tokenizer, (2,))
    groups = sample_groups(policy, {}, asked, keys, 2, 3, Sampling(), **names)
    assert [one.text for group in groups for one in group.completions] == [" 42", "42", "4", " Yes"]


# --- Requests one by one.


def requests_of(limits=(MAX_TOKENS,), samplings=(PLAIN_SAMPLING,), group_size=3):
    """The requests of a batch, whose limits and distributions take turns."""
    _, _, prompts, mask = problem(PLAIN)
    requests = []
    for row in range(len(prompts) * group_size):
        prompt, key = row // group_size, jax.random.fold_in(jax.random.key(3), row)
        own = limits[row % len(limits)], samplings[row % len(samplings)]
        requests.append(Request(prompts[prompt][mask[prompt]], np.asarray(jax.random.key_data(key)), *own))
    return requests


def alone(requests, params=None, stop_ids=LATE):
    """Completions of requests, each of which has an engine for itself, of as many slots as that of most tests."""
    decoder, own, *_ = problem(PLAIN)
    found = []
    for request in requests:
        engine = engine_of(decoder, own if params is None else params, stop_ids, slots=5)
        (ticket,) = engine.admit([request])
        found.append(engine.drain()[ticket])
    return found


def assert_completions(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert_same_logprobs(one.logprobs, other.logprobs)
        assert one.truncated == other.truncated


@pytest.mark.parametrize("slots", [*slow(4), *campaign(None)])
def test_requests_of_all_kinds_arrive_while_others_are_sampled(slots):
    samplings = Sampling(), Sampling(0.8, top_k=5)
    requests = requests_of(limits=(1, 3, 9, 20), samplings=samplings)
    decoder, params, *_ = problem(PLAIN)
    engine, tickets, found = engine_of(decoder, params, slots=slots), [], {}
    for some in (requests[:5], requests[5:6], requests[6:7], requests[7:8], requests[8:]):
        tickets += engine.admit(some)
        found |= engine.step()
    found |= engine.drain()
    assert sorted(found) == sorted(tickets) and len(tickets) == 12
    assert_completions([found[ticket] for ticket in tickets], alone(requests))


@pytest.mark.slow
def test_what_a_program_reads_stays_as_it_was(monkeypatch):
    """A device that is behind the others may read an array of the host after the engine has gone on."""
    given = []

    def watched(program):
        def called(*arguments, **options):
            arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, np.ndarray)]
            given.extend((program.__name__, x, x.copy()) for x in arrays)
            return program(*arguments, **options)

        return called

    programs = (
        (decoding, ("prefill", "first_tokens", "decode")),
        (keys_values, ("put_started", "gather_slots")),
    )
    for module, name in [(module, name) for module, names in programs for name in names]:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    decoder, params, *_ = problem(PLAIN)
    engine, requests = engine_of(decoder, params), requests_of(limits=(3, 6, 24))
    engine.admit(requests, group_size=3)
    engine.drain()
    (ticket,) = engine.admit(requests[:1])
    prefix = np.append(requests[0].prefix, engine.drain()[ticket].tokens)
    engine.admit([requests[0]._replace(prefix=prefix)])
    engine.drain()
    assert {name for name, *_ in given} == {name for _, names in programs for name in names}
    for name, now, then in given:
        np.testing.assert_array_equal(now, then, err_msg=name)


@pytest.mark.slow
def test_a_batch_comes_in_while_others_are_under_way():
    decoder, params, *_ = problem(PLAIN)
    engine, requests = engine_of(decoder, params, slots=5), requests_of()
    tickets = engine.admit(requests, group_size=3)
    found = engine.step()
    tickets += engine.admit(requests[4:6])
    tickets += engine.admit(requests[3:9], group_size=3)
    found |= engine.drain()
    assert_completions([found[ticket] for ticket in tickets], alone([*requests, *requests[4:6], *requests[3:9]]))


@pytest.mark.slow
def test_equal_prefixes_of_one_call_are_run_once(monkeypatch):
    decoder, params, *_ = problem(PLAIN)
    engine, run, prefill = engine_of(decoder, params), [], decoding.prefill
    monkeypatch.setattr(decoding, "prefill", lambda *args, **kw: run.append(len(args[1])) or prefill(*args, **kw))
    requests = [request._replace(prefix=request.prefix.copy()) for request in requests_of()]
    engine.admit(requests[::3] + requests[1::3])
    engine.drain()
    assert run == [4]


@pytest.mark.parametrize("more", campaign_except([1, 13], 1), ids=["in the same cache", "in a longer cache"])
@pytest.mark.parametrize(
    "batch",
    campaign_except([False, True], False, slow=[True]),
    ids=["single requests", "a batch that shares its prompts"],
)
def test_a_request_goes_on_from_what_a_slot_holds(more, batch, monkeypatch):
    decoder, params, *_ = problem(PLAIN)
    random, engine = np.random.default_rng(5), engine_of(decoder, params, slots=5)
    requests = requests_of(limits=(8,) if batch else (4, 8))[3:6]
    tickets = engine.admit(requests, 3 if batch else None)
    found, run, prefill = engine.drain(), [], decoding.prefill
    with monkeypatch.context() as patched:
        patched.setattr(decoding, "prefill", lambda *args, **kw: run.append(args) or prefill(*args, **kw))
        for turn in range(2):  # twice in a row
            for place, ticket in enumerate(tickets):
                said = random.integers(0, 23, more + turn)
                prefix = np.concatenate([requests[place].prefix, found[ticket].tokens, said]).astype(np.int32)
                requests[place] = requests[place]._replace(prefix=prefix)
            tickets = engine.admit(requests)
            found = engine.drain()
    assert len(run) == 2
    for turn, (_, _, mask, held) in enumerate(run):
        # The last sampled token has no keys and values yet.
        assert held is not None and mask.sum(-1).max() == more + turn + 1
    assert_completions([found[ticket] for ticket in tickets], alone(requests))


@pytest.mark.slow
def test_requests_continue_prompts_of_a_one_round_batch():
    decoder, params, *_ = problem(PLAIN)
    engine, requests = engine_of(decoder, params, ()), requests_of(limits=(5,))
    tickets = engine.admit(requests, group_size=3)
    later = engine.admit(requests[:2])  # wait for the end of the batch
    found = engine.drain()
    assert_completions([found[ticket] for ticket in [*tickets, *later]], alone([*requests, *requests[:2]], stop_ids=()))
    longer = [
        one._replace(prefix=np.append(one.prefix, found[ticket].tokens), limit=9)
        for one, ticket in zip(requests, tickets, strict=True)
    ]
    tickets = engine.admit(longer)
    found = engine.drain()
    assert_completions([found[ticket] for ticket in tickets], alone(longer, stop_ids=()))


def test_no_request_continues_a_slot_of_other_weights():
    decoder, params, *_ = problem(PLAIN)
    engine, request = engine_of(decoder, params, slots=5), requests_of()[3]
    (ticket,) = engine.admit([request])
    later = request._replace(prefix=np.append(request.prefix, engine.drain()[ticket].tokens))
    others = jax.device_put(jax.tree.map(lambda x: np.float32(1.5) * x, jax.device_get(params)))
    engine.replace_weights(others, version=1)
    (ticket,) = engine.admit([later])
    assert_completions([engine.drain()[ticket]], alone([later], others))


@pytest.mark.slow
def test_weights_are_replaced_between_rounds():
    decoder, params, *_ = problem(PLAIN)
    others = jax.device_put(jax.tree.map(lambda x: np.float32(1.5) * x, jax.device_get(params)))
    engine, requests = engine_of(decoder, params, (), version=3), requests_of()[:6]
    tickets = engine.admit(requests)
    assert not engine.step()
    engine.replace_weights(others, version=5)
    found = engine.drain()
    found = [found[ticket] for ticket in tickets]
    before = alone(requests, stop_ids=())
    for one, request, other in zip(found, requests, before, strict=True):
        assert one.versions.tolist() == [3] * 6 + [5] * (MAX_TOKENS - 6)  # the first token, and a round of five
        np.testing.assert_array_equal(one.tokens[:6], other.tokens[:6])
        assert_same_logprobs(one.logprobs[:6], other.logprobs[:6])
        # The keys and values of the first tokens stay those of the earlier weights.
        expected = logprobs_across(decoder, {3: params, 5: others}, request.prefix, one.tokens, one.versions)
        assert_same_logprobs(one.logprobs, expected)
    assert any((one.tokens != other.tokens).any() for one, other in zip(found, before, strict=True))


# --- How many slots there are, and what is refused.


@pytest.mark.slow
def test_memory_decides_on_the_slots(monkeypatch):
    decoder, params, prompts, mask = problem(PLAIN)
    options = {"group_size": 3, "max_tokens": MAX_TOKENS, "sampling": Sampling()}
    slots = {}
    for free in (2**30, 60_000, 1):
        monkeypatch.setattr(plan, "ALWAYS_FREE", 0)
        monkeypatch.setattr(plan, "free_bytes", lambda free=free: free)
        engine = engine_of(decoder, params)
        sampled = sample_completions(engine, prompts, mask, row_keys(jax.random.key(3), 3 * len(prompts)), **options)
        slots[free] = engine._plan.slots[-1]
        assert_completions(sampled, assert_same(12))
    assert slots == {2**30: 12, 60_000: 6, 1: 1}


def test_a_new_plan_has_the_memory_of_the_old_slots(monkeypatch):
    decoder, params, *_ = problem(PLAIN)
    monkeypatch.setattr(plan, "ALWAYS_FREE", 0)
    slots = []
    for held in (0, 60_000):
        monkeypatch.setattr(plan, "free_bytes", lambda held=held: 100_000 - held)
        engine = engine_of(decoder, params)
        engine._slots.memory = jnp.zeros(held, jnp.uint8)
        engine.admit(requests_of()[:1] * 16)
        engine._make_plan(0)
        slots.append(engine._plan.slots[-1])
    assert 1 < slots[0] == slots[1] < 16


def test_bytes_are_those_of_arrays():
    decoder = Decoder(PLAIN, "bfloat16")
    sizes = {"prompts": 3, "prompt_tokens": 5, "rows": 7, "completion_tokens": 11}
    like = tuple(np.zeros((2, 1, 2, 1, 4), jnp.bfloat16) for _ in range(2))
    made = keys_values.empty(like, rows=3, time=5), keys_values.empty(like, rows=7, time=11)
    assert plan.key_value_bytes(decoder, **sizes) == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    assert plan.score_bytes(decoder, 7) == 2 * np.zeros((7, 23), np.float32).nbytes
    assert plan.free_bytes() > 2**20


def test_what_cannot_be_sampled_is_refused():
    decoder, params, *_ = problem(PLAIN)
    engine, request = engine_of(decoder, params), requests_of()[0]
    for wrong, message in [
        (request._replace(prefix=request.prefix[:0]), "request 1: its prefix is empty; give"),
        (request._replace(limit=0), "request 1: limit = 0: takes 1 or more"),
        (request._replace(prefix=np.array([3, 23], np.int32)), "token 23 is outside the vocabulary of 23; use"),
        (request._replace(prefix=np.array([-1], np.int32)), "token -1 is outside"),
    ]:
        with pytest.raises(UserError, match=message):
            engine.admit([request, wrong])
    with pytest.raises(UserError, match="request 3: its prefix differs from its group's; change group_size"):
        engine.admit(requests_of(), group_size=4)
    with pytest.raises(UserError, match="group_size = 2: does not divide the number of requests, 3; change"):
        engine.admit([request] * 3, group_size=2)
    with pytest.raises(UserError, match="no weights; call replace_weights"):
        Engine(decoder, LATE, slots=None, prefix_time=5).step()
    assert engine.admit([]) == [] and engine.drain() == {}


@pytest.mark.slow
def test_the_sizes():
    assert [plan.slot_numbers(most) for most in (1, 5, 13)] == [[1], [5], [7, 13]]
    sizes = functools.partial(plan.plan_for, Decoder(PLAIN), 40, prefix_time=5)
    batches = [sizes(longest, 10, slots=20) for longest in (1, 6, 24, 40, 60)]
    # 28 tokens and the round fill up to a tile's 16; and not 16, 32, 48.
    assert [one.lengths for one in batches] == [[1], [5, 10], [16, 32], [16, 48], [16, 32, 64]]
    assert [one.round_time for one in batches] == [1, 5, 5, 5, 5] and batches[0].slots == [5, 10, 20]
    assert [sizes(longest, 10, slots=40)[2:] for longest in (1, 6)] == [([40], 1, (0,)), ([40], 5, (0,))]
    batch = sizes(60, 10, slots=40)
    assert [batch.cache_time(9, slots) for slots in (40, 20, 10, 5)] == [16, 16, 32, 64]
    assert [batch.cache_time(33, slots) for slots in (40, 5)] == [64, 64]
    assert (batch.rows(3), batch.prompt_time(4), batch.prompt_time(9)) == (3, 5, 16)
    others = sizes(60, None, slots=20)
    assert others[0] == 64 and others[2:] == ([5, 10, 20], 5, ())
    assert [others.cache_time(*some) for some in ((9, 20), (17, 5), (17, 5, 64), (17, 5, 256))] == [16, 32, 64, 32]
    assert (others.rows(3), others.rows(4)) == (4, 4)
