"""What tracing, compressors, composition and comparison reject, each in one line."""

import math
from dataclasses import replace

import pytest
import torch

import kvcat
from kvcat.cache import CacheRecord, fingerprint
from kvcat.cache.token_ids import check_batch_of_ids
from kvcat.compress import (
    AttentionMatching,
    CalibratedBudgets,
    Eviction,
    GradientCompression,
    Reconstruction,
    compare,
    make_compressor,
    protecting,
    replay,
    smallest_cache,
    supervised_kl,
    trace,
)
from kvcat.compress.parts import trace_in_parts
from kvcat.compress.solvers import fit_log_bias, fit_values
from kvcat.files import read_json, write_json
from tiny import loud_model, refusal_with, rejections

IDS = torch.arange(3, 23)[None]
SCORES = torch.zeros(3, 2)
NO_ROTATION = {"ffn_dim": 48, "word_embed_proj_dim": 32}
GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
}
SIZES = (1, 2, 4, 8, 11, 16, 23, 32, 45, 64)


@pytest.fixture
def alone(model, windows):
    """A trace without tokens after its prefix."""
    return trace(model, windows[:, :48], supervision="self")


@pytest.fixture
def compact(double, windows):
    return AttentionMatching()(trace(double, windows, 32), num_slots=9)


@pytest.fixture
def documents(double, windows):
    """The caches of two documents of 20 and 24 tokens, two examples each."""
    texts = (windows[:2, :20], windows[:2, 20:44])
    return [AttentionMatching()(trace(double, x, supervision="self"), num_slots=7) for x in texts]


@pytest.fixture
def budgets(model, tmp_path):
    """A file of budgets."""
    errors = tuple((tuple(1 / size for size in SIZES),) * 2 for _ in range(2))
    measured = CalibratedBudgets(
        model="tiny",
        fingerprint=fingerprint(model),
        num_documents=3,
        num_tokens=64,
        sizes=SIZES,
        errors=errors,
    )
    measured.save(tmp_path / "b.json")
    return tmp_path / "b.json"


def zeros(num_tokens, *arguments, **options):
    return trace(loud_model(), torch.zeros(1, num_tokens, dtype=torch.long), *arguments, **options)


def with_repetition(prefix_len):
    """The trace of a text that is repeated."""
    ids = torch.zeros(1, 2 * prefix_len + 10, dtype=torch.long)
    return trace(loud_model(), Reconstruction(ids, prefix_len, prefix_len + 10))


def infinite():
    model = loud_model()
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.inf
    return model


def under_autocast(call, *arguments, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return call(*arguments, **options)


def composed(documents, double, *, second=None, **options):
    one, two = documents
    return kvcat.compose(double, [one, two if second is None else second], **options)


def refitted(documents, double, text, prefix_len=44):
    return composed(documents, double, refit=trace(double, text, prefix_len))


def compressed_with(file, traced, **options):
    return AttentionMatching(budgets=str(file))(traced, **options)


def loaded_after(file, change):
    """The budgets of a file after a change of its text."""
    file.write_text(change(file.read_text()))
    return AttentionMatching(budgets=str(file))


def rewritten(file, change):
    """The budgets of a file after a change of its entries."""
    write_json(file, change(read_json(file)))
    return AttentionMatching(budgets=str(file))


def made(*words, **options):
    """A call that makes a compressor."""
    return lambda: make_compressor(*words, **options)


def sized(**size):
    """A call of a compressor on a trace with a prefix of 48 tokens."""
    return lambda traced: Eviction("snapkv")(traced, **size)


def with_past(name):
    """A call of a scorer on a trace that continues a compact cache."""
    return lambda double, windows, compact: Eviction(name)(
        trace(double, windows, 48, past=compact), num_slots=5
    )


def in_half_precision(name):
    """A call of a compressor under autocast."""
    return lambda traced: under_autocast(make_compressor(name), traced, num_slots=6)


def ids(tokens):
    return check_batch_of_ids(tokens)


def repeated(windows):
    """A text of 48 tokens and a copy of it."""
    return Reconstruction(torch.cat([windows[:1, :48]] * 2, 1), 48, 48)


def with_first(cache):
    """The cache with a record of its first three tokens alone."""
    return replace(cache, record=replace(cache.record, first_ids=((5, 6, 7), (8, 9, 10))))


def protected(double, text):
    traced = trace(double, text, supervision="self")
    return AttentionMatching()(traced, num_slots=7, protect=[(0, 3)])


def two_of(model, windows):
    """Two documents in one cache."""
    cache = Eviction("streaming")(trace(model, windows, supervision="self"), num_slots=5)
    return kvcat.compose(model, [cache, cache])


def appended(model, windows):
    return kvcat.append(model, trace(model, windows, supervision="self").dense_cache(), windows)


def static_with_states():
    """A static cache of a model of which one layer alone sees the whole text."""
    model = loud_model("gemma3_text", **GEMMA3)
    cache = Eviction("keynorm")(trace(model, IDS, supervision="self"), num_slots=6)
    return cache.inputs(model, IDS[:, :3], static_tokens=8)


@rejections(
    # a trace
    ("input_ids must be a tensor of shape (batch, tokens), not a list", lambda: ids([[1, 2, 3]])),
    ("not int64 of shape (5,)", lambda: ids(torch.arange(5))),
    ("not float32 of shape (1, 5)", lambda: ids(torch.ones(1, 5))),
    ("prefix_len is missing", lambda: zeros(64)),
    ("prefix_len must be in [1, 63], not 64", lambda: zeros(64, 64)),
    ("prefix_len must be in [1, 63], not 0", lambda: zeros(64, 0)),
    ("prefix_len must be in [1, 64], not 65", lambda: zeros(64, 65, supervision="self")),
    ("must be one of suffix, first-half, reconstruction, self, not 'none'",
     lambda: zeros(64, 8, supervision="none")),
    ("prefix and suffix have 129 tokens, and the model 128 positions: shorten",
     lambda: zeros(129, 8)),
    ("the text has 60 tokens, and the model 128 positions, too few", lambda: with_repetition(60)),
    ("the text has 130 tokens, and the model 128 positions: shorten the text",
     lambda: with_repetition(130)),
    ("chunk_tokens is 0; it must be at least 1", lambda: zeros(64, 8, chunk_tokens=0)),
    ("room is -1; it must be at least 0", lambda: zeros(64, 8, room=-1)),
    ("MistralForCausalLM: every layer has a sliding window of 20 tokens",
     lambda windows: trace(loud_model("mistral", sliding_window=20), windows[:, :24], 12)),
    ("LlamaForCausalLM computes numbers that are not finite",
     lambda windows: trace(infinite(), windows, 48)),
    ("torch.autocast is on", lambda model, windows: under_autocast(trace, model, windows, 48)),
    ("past holds 32 tokens: the prefix of 32 adds none",
     lambda double, windows, compact: trace(double, windows, 32, past=compact)),
    ("past holds 3 examples, input_ids 2",
     lambda double, windows, compact: trace(double, windows[:2], 48, past=compact)),
    ("past belongs to another text: row 1 of the tokens",
     lambda double, windows, compact: trace(double, windows[[0, 2, 1]], 48, past=compact)),
    # sizes and protected ranges of a compressor
    ("keep_ratio must be in (0, 1], not 0.0", sized(keep_ratio=0.0)),
    ("keep_ratio must be in (0, 1], not 1.01", sized(keep_ratio=1.01)),
    ("keep_ratio is nan", sized(keep_ratio=math.nan)),
    ("num_slots must be in [1, 48], not 0", sized(num_slots=0)),
    ("num_slots must be in [1, 48], not 49", sized(num_slots=49)),
    ("give either keep_ratio or num_slots", sized()),
    ("give either keep_ratio or num_slots", sized(keep_ratio=0.5, num_slots=3)),
    ("protect holds (3, 3): a range has 0 <= first", lambda traced: protecting(traced, [(3, 3)])),
    ("protect holds (5, 2)", lambda traced: protecting(traced, [(5, 2)])),
    ("protect holds (-1, 2)", lambda traced: protecting(traced, [(-1, 2)])),
    ("protect holds (40, 49)", lambda traced: protecting(traced, [(40, 49)])),
    ("must be a whole number", lambda traced: protecting(traced, [(0.0, 2)])),
    ("must be a whole number", lambda traced: protecting(traced, [(True, 2)])),
    ("protect holds 7, not a pair of positions", lambda traced: protecting(traced, [7])),
    ("not a pair of positions", lambda traced: protecting(traced, [(1, 2, 3)])),
    # options of compressors
    ("no compressor 'zip'; there are attention-matching", made("zip")),
    ("attention-matching has no option 'speed' (did you mean seed?); its options",
     made("attention-matching", speed=2)),
    ("log_bias is 'no'; it must be true or false", made("attention-matching", log_bias="no")),
    ("num_queries is 1.5; it must be a whole number or null",
     made("attention-matching", num_queries=1.5)),
    ("seed is True; it must be a whole number", made("attention-matching", seed=True)),
    ("preset must be one of stable, known, paper", made("attention-matching", preset="fast")),
    ("num_queries must be at least 1, not 0", made("attention-matching", num_queries=0)),
    ("ridge must be larger than 0, not -1.0", made("attention-matching", ridge=-1.0)),
    ("ridge is inf", made("attention-matching", ridge=math.inf)),
    ("num_iters must be at least 0, not -2", made("attention-matching", num_iters=-2)),
    ("own_weight must be at least 0, not -0.1", made("attention-matching", own_weight=-0.1)),
    ("own_weight is nan", made("attention-matching", own_weight=math.nan)),
    ("equal, adaptive, or a file", made("attention-matching", budgets="fair")),
    ("equal, adaptive, or a file", made("attention-matching", budgets="gone.json")),
    ("snapkv has no option 'seed'; its options: window, kernel_size, pooling",
     made("snapkv", seed=2)),
    ("snapkv: kernel_size is 3.0; it must be a whole number", made("snapkv", kernel_size=3.0)),
    ("kernel_size must be odd and positive, not 4", made("snapkv", kernel_size=4)),
    ("window is 0; it must be at least 1", made("snapkv", window=0)),
    ("pooling must be one of", made("snapkv", pooling="min")),
    ("num_sinks is -1; it must be at least 0", made("streaming", num_sinks=-1)),
    ("first has no option 'seed'; its options: none", made("first", seed=1)),
    ("h2o has no option 'name'", made("h2o", name="x")),
    ("init is None; it must be text", made("gradient", init=None)),
    ("init must be one of attention-matching, first", made("gradient", init="last")),
    ("has no option 'seed'", made("gradient", init="random,seed=2")),
    ("snapkv has no option", made("gradient", init="snapkv,seed=2")),
    ("ridge must be", made("gradient", init="attention-matching,ridge=0.0")),
    ("lr must be larger than 0", made("gradient", lr=0.0)),
    ("lr is inf", made("gradient", lr=math.inf)),
    ("num_steps is -1; it must be at least 0", made("gradient", num_steps=-1)),
    ("schedule must be one of", made("gradient", schedule="warm")),
    ("preset must be one of stable, known", made("refined", preset="paper")),
    ("num_steps is -1", made("refined", num_steps=-1)),
    ("budgets must be one of", made("refined", budgets="none")),
    ("bits must be 8 or 4, not 3", made("snapkv", bits=3)),
    ("bits must be 8 or 4, not 16", made("snapkv", bits=16)),
    ("bits must be", made("snapkv", bits="4/3")),
    ("bits must be", made("snapkv", bits=None)),
    # a file of budgets
    (
        "the budgets belong to tiny",
        lambda budgets, windows: compressed_with(
            budgets, trace(loud_model(std=0.2), windows, supervision="self"), num_slots=8
        ),
    ),
    (
        "sizes from 0.016 of a text",  # one slot of 64 is the smallest average that was measured
        lambda budgets, model, windows: compressed_with(
            budgets, trace(model, windows.repeat(1, 2), supervision="self"), num_slots=1
        ),
    ),
    ("is damaged", lambda budgets: loaded_after(budgets, lambda t: t.replace("1.0", "2.0", 1))),
    ("kvcat-budgets-1: make the budgets again",
     lambda budgets: loaded_after(budgets, lambda _: '{"format": "kvcat-budgets-9"}')),
    ("not readable", lambda budgets: loaded_after(budgets, lambda text: text[:-20])),
    ("no file of `kvcat budgets`", lambda budgets: loaded_after(budgets, lambda _: '{"a": 1}')),
    (
        "not of this version: it lacks 'sizes'",
        lambda budgets: rewritten(
            budgets, lambda entries: {k: v for k, v in entries.items() if k != "sizes"}
        ),
    ),
    ("not of this version: it has an unknown entry 'more'",
     lambda budgets: rewritten(budgets, lambda entries: {**entries, "more": 1})),
    # what a method needs of a trace
    ("part of which is already compact", with_past("h2o")),
    ("part of which is already compact", with_past("snapkv")),
    ("part of which is already compact", with_past("tova")),
    ("torch.autocast is on", in_half_precision("attention-matching")),
    ("torch.autocast is on", in_half_precision("snapkv")),
    ("torch.autocast is on", in_half_precision("gradient")),
    ("torch.autocast is on", in_half_precision("refined")),
    ("no predictions after its prefix",
     lambda alone: GradientCompression(num_steps=1)(alone, num_slots=5)),
    ("no predictions after its prefix",
     lambda alone: GradientCompression(num_steps=1).snapshots(alone, num_slots=5)),
    ("no predictions after its prefix",
     lambda alone: GradientCompression(num_steps=1).each(alone, [0.1])),
    (
        "the 48 tokens were repeated in parts",
        lambda model, windows: GradientCompression(num_steps=1)(
            trace_in_parts(model, repeated(windows), part_tokens=24), num_slots=9
        ),
    ),
    (
        "needs queries at positions after the prefix",
        lambda windows: make_compressor("refined")(
            trace(loud_model("opt", **NO_ROTATION), windows[:, :48], supervision="self"),
            num_slots=6,
        ),
    ),
    ("preset=stable", lambda alone: make_compressor("refined", preset="known")(alone, num_slots=6)),
    # the smallest cache for a KL, and comparisons
    ("max_kl must be at least 0, not -0.1",
     lambda traced: smallest_cache(traced, pytest.fail, -0.1)),
    ("max_kl is nan; it must be a finite number",
     lambda traced: smallest_cache(traced, pytest.fail, math.nan)),
    ("held_out must be in (0, 1), not 0.0",
     lambda traced: smallest_cache(traced, pytest.fail, 0.1, held_out=0.0)),
    ("leaves none of the 16 supervising positions",
     lambda traced: smallest_cache(traced, pytest.fail, 0.1, held_out=0.99)),
    ("supervision='self' has no predictions after its prefix",
     lambda alone: smallest_cache(alone, pytest.fail, 0.1)),
    ("does not belong to a trace",
     lambda traced, model, windows: compare(traced, trace(model, windows, 40).dense_cache())),
    (
        "the cache belongs to another text: row 0",
        lambda traced, model, windows: compare(
            trace(model, windows.roll(1, 0), 48), traced.dense_cache()
        ),
    ),
    (
        "the cache belongs to another text: row 2",
        lambda traced, model, windows: compare(
            trace(model, windows[[0, 1, 1]], 48), traced.dense_cache()
        ),
    ),
    (
        "the cache belongs to another text: row 1",
        lambda traced, model, windows: supervised_kl(
            traced, trace(model, windows[:1], 48).dense_cache()
        ),
    ),
    ("no suffix to compare on", lambda alone: compare(alone, alone.dense_cache())),
    (
        "belongs to another model",
        lambda traced, windows: replay(
            loud_model(rms_norm_eps=1e-2), traced.dense_cache(), windows[:, 48:]
        ),
    ),
    ("static_tokens", static_with_states),
    # composition
    ("give at least one", lambda double: kvcat.compose(double, [])),
    ("seam_tokens must be in [0, 16], not 17",
     lambda documents, double: composed(documents, double, seam_tokens=17)),
    ("document 1 belongs to another model",
     lambda documents: composed(documents, loud_model(dtype=torch.float64, num_hidden_layers=3))),
    ("document 2 holds 1 examples",
     lambda documents, double: composed(documents, double, second=documents[1].select([0]))),
    (
        "document 2 opens a turn",
        lambda documents, double: composed(
            documents,
            double,
            second=replace(documents[1], record=replace(documents[1].record, chat=True)),
        ),
    ),
    (
        "3 documents: 192 tokens exceed the model's 128 positions",
        lambda double, windows: kvcat.compose(
            double, [trace(double, windows, supervision="self").dense_cache()] * 3
        ),
    ),
    ("the document and the text after it: 128 tokens exceed the model's 112 positions",
     lambda windows: appended(loud_model(max_position_embeddings=112), windows)),
    (
        "does not record its first tokens (0 of ",
        lambda documents, double: composed(
            documents, double, second=replace(documents[1], record=CacheRecord())
        ),
    ),
    (
        "does not record its first tokens (3 of 4)",
        lambda documents, double: composed(
            documents, double, second=with_first(documents[1]), seam_tokens=4
        ),
    ),
    (
        "which tokens its slots represent",
        lambda documents, double, windows: composed(
            documents,
            double,
            second=GradientCompression(num_steps=1)(
                trace(double, windows[:2, 20:64], 24), num_slots=7
            ),
        ),
    ),
    ("refit is a trace of 2 prefixes of 20 tokens",
     lambda documents, double, windows: refitted(documents, double, windows[:2], 20)),
    ("document 1, to refit, belongs to another text",
     lambda documents, double, windows: refitted(documents, double, windows[:2].roll(1, 1))),
    (
        "protected slots, which a refit would change",
        lambda documents, double, windows: composed(
            [protected(double, windows[:2, :20]), documents[1]],
            double,
            refit=trace(double, windows[:2], 44),
        ),
    ),
    ("cannot serve 1 rows",
     lambda documents, double, windows: kvcat.append(double, documents[0], windows[:1])),
    ("has no rotary position embedding",
     lambda windows: two_of(loud_model("opt", **NO_ROTATION), windows)),
    (
        "depend on the length",
        lambda windows: two_of(
            loud_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            windows,
        ),
    ),
    # solvers
    ("bounds must increase", lambda: fit_log_bias(SCORES, SCORES, bounds=(3.0, -3.0))),
    ("lie within 50 nats", lambda: fit_log_bias(SCORES, SCORES, bounds=(-60.0, 3.0))),
    ("num_iters is -1; it must be at least 0", lambda: fit_log_bias(SCORES, SCORES, num_iters=-1)),
    ("pull must be at least 0, not -0.1", lambda: fit_log_bias(SCORES, SCORES, pull=-0.1)),
    ("num_iters=2 steps are without a pull",
     lambda: fit_log_bias(SCORES, SCORES, pull=0.1, num_iters=2)),
    ("ridge must be larger than 0", lambda: fit_values(SCORES, SCORES, ridge=0.0)),
)  # fmt: skip
def test_what_cannot_be_right_is_rejected_in_one_line(message, call, request):
    assert message in refusal_with(request, call)
