import json
import math

import numpy as np
import pytest
import torch
from profile_examples import PLAN, PREFIX, SUFFIX, VOCAB, drawn, noise, tiny
from transformers import GPT2Config, GPT2LMHeadModel

import kvcat.evals.profile as module
from kvcat.errors import InputError
from kvcat.evals import Method, read_records
from kvcat.evals.profile import profile
from kvcat.evals.profile_checks import check_models, slot_grid
from kvcat.evals.profile_errors import MEASURES, output_errors, without_prefix
from kvcat.evals.profile_suffixes import PrefixSuffixes, SuffixPlan
from kvcat.evals.profile_summary import STATISTICS, profile_rows, slots_needed
from kvcat.evals.profile_tables import needed_csv, profile_csv, profile_markdown

METHODS = [Method("attention-matching"), Method("first"), Method("gradient", {"num_steps": 3, "init": "first"})]


@pytest.fixture(scope="module")
def models():
    return {"base": (tiny(0), None), "kvcat": (tiny(1), None)}


@pytest.fixture(scope="module")
def texts(models):
    return drawn(models["base"][0], noise())


def run(models, texts, out_dir, methods=METHODS, slots=(2, 4, PREFIX), plan=PLAN):
    return profile(models, texts, plan, methods, slots, out_dir, dataset="noise", progress=False)


@pytest.fixture(scope="module")
def finished(models, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "out"
    return folder, run(models, texts, folder)


def kind_of(record):
    return record.dataset.rpartition(":")[2]


def outputs_behind(model, prefix, suffix, kept):
    """Representations and log-probabilities of the suffix when it sees the first slots only: stock attention, a mask"""
    tokens = torch.tensor([[*prefix, *suffix]])
    length = tokens.shape[1]
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[len(prefix) :, kept : len(prefix)] = False
    mask = torch.zeros(1, 1, length, length).masked_fill(~sees, -math.inf)
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, output_hidden_states=True)
    own = slice(len(prefix), None)
    return found.hidden_states[-1][0, own].double().numpy(), found.logits[0, own].double().log_softmax(-1).numpy()


@pytest.mark.parametrize(("method", "kept"), [("no-context", 0), ("first", 2), ("first", 4)])
def test_every_measure_is_that_of_stock_attention_over_the_kept_slots(finished, texts, method, kept):
    stock = tiny(0)
    for text in texts:
        every = {}
        for kind, groups in text.suffixes.items():
            every[kind] = {name: [] for name in MEASURES}
            for row, counted in zip(groups["test"], text.held_out(kind, "test").tolist(), strict=True):
                (whole, p), (small, q) = (outputs_behind(stock, text.prefix, row, n) for n in (PREFIX, kept))
                for k in np.flatnonzero(counted):
                    every[kind]["kl"].append(sum(np.exp(p[k]) * (p[k] - q[k])))
                    every[kind]["tv"].append(sum(abs(np.exp(p[k]) - np.exp(q[k]))) / 2)
                    every[kind]["log_prob"].append(max(abs(p[k] - q[k])))
                    every[kind]["output"].append(math.dist(whole[k], small[k]))
        own = [
            r
            for r in finished[1]
            if (r.model, r.method, r.values["num_slots"]) == ("base", method, kept)
            and (r.document, r.example) == (text.document, text.name)
        ]
        assert [kind_of(record) for record in own] == list(text.suffixes)
        for record in own:
            for name, values in every[kind_of(record)].items():
                assert record.values["num_outputs"] == len(values)
                assert record.values[name] == pytest.approx(np.mean(values), rel=2e-4)
                assert record.values[f"{name}_worst"] == pytest.approx(max(values), rel=2e-4)


def test_without_a_cache_tokens_stand_at_their_own_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager")
    model = GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight)
    prefix, suffix = list(range(PREFIX)), [5, 1, 7]
    alone = without_prefix(model, torch.tensor([suffix]), PREFIX)[0]
    assert torch.allclose(alone.double(), torch.from_numpy(outputs_behind(model, prefix, suffix, 0)[0]), atol=1e-5)


def test_with_all_slots_every_error_is_exactly_zero_and_without_any_none_is(finished):
    for record in finished[1]:
        errors = [v for k, v in record.values.items() if k.removeprefix("fit_").removeprefix("choice_") in MEASURES]
        if record.method == "dense":
            assert record.keep_ratio == 1.0
            assert set(errors) == {0.0}
        if record.method == "no-context":
            assert record.keep_ratio == 0.0
            assert min(errors) > 1e-3


def test_the_measures_keep_their_inequalities(finished):
    for record in finished[1]:
        v = record.values
        assert v["tv"] <= math.sqrt(v["kl"] / 2) + 1e-12  # Pinsker, and Jensen over the outputs
        assert v["kl_worst"] <= v["log_prob_worst"] + 1e-12
        assert v["tv_worst"] <= 1.0
        assert all(v[name] <= v[f"{name}_worst"] for name in MEASURES)


def test_what_is_not_finite_is_infinitely_wrong(models):
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    broken = hidden.clone()
    broken[1, 2] = torch.nan
    errors = output_errors(models["base"][0], hidden, broken)
    for values in errors.values():
        assert values[1, 2] == math.inf
        assert values.flatten()[:-1].tolist() == [0.0] * 5


def test_one_cache_serves_every_suffix_and_gradient_steps_bring_it_nearer_where_it_is_fitted(models, texts, tmp_path):
    start, trained = (Method("gradient", {"num_steps": n, "init": "first", "lr": 0.05}) for n in (0, 40))
    records = run({"base": models["base"]}, texts[:1], tmp_path, [start, trained, Method("first")], (3,))
    rows = {row.method: row for row in profile_rows(records, measures=["kl"], num_resamples=9) if row.kind == "all"}
    assert rows["gradient init=first lr=0.05 num_steps=0"].fit_mean == pytest.approx(rows["first"].fit_mean, rel=1e-6)
    assert rows["gradient init=first lr=0.05 num_steps=40"].fit_mean < 0.7 * rows["first"].fit_mean


def test_suffixes_traced_a_few_at_a_time_give_the_same_caches(models, texts, tmp_path, monkeypatch):
    args = ({"base": models["base"]}, texts[:1])
    whole = run(*args, tmp_path / "whole")
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 2 * (PREFIX + SUFFIX))
    for one, other in zip(whole, run(*args, tmp_path / "parts"), strict=True):
        assert one.key == other.key
        assert other.values == pytest.approx(one.values, rel=2e-3, abs=1e-6)


def test_every_model_prefix_cache_and_kind_has_its_record(finished, models, texts):
    folder, records = finished
    assert records == read_records(folder)
    cells = [("no-context", 0), *((m.name, r) for m in METHODS for r in (2, 4)), ("dense", PREFIX)]
    wanted = [
        (model, text.document, text.name, method, slots / PREFIX, kind)
        for model in models for text in texts for method, slots in cells for kind in text.suffixes
    ]  # fmt: skip
    found = [(r.model, r.document, r.example, r.method, r.keep_ratio, kind_of(r)) for r in records]
    assert found == wanted
    assert json.loads((folder / "config.json").read_text())["evaluation"] == "profile"


def test_a_killed_run_continues_to_the_same_records(finished, models, texts, tmp_path):
    folder, records = finished
    content = (folder / "records.jsonl").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "records.jsonl").write_bytes(content[: int(0.55 * len(content))])
    assert run(models, texts, tmp_path) == records
    assert (tmp_path / "records.jsonl").read_bytes() == content
    assert (tmp_path / "suffixes.json").read_bytes() == (folder / "suffixes.json").read_bytes()


def test_a_finished_run_is_read_and_not_repeated(finished, models, texts, monkeypatch):
    monkeypatch.setattr(module, "trace", None)
    assert run(models, texts, finished[0]) == finished[1]


def test_a_model_added_later_gives_what_both_at_once_give(models, texts, tmp_path):
    quick = {"methods": [Method("first")], "slots": (2,)}
    both = run(models, texts, tmp_path / "both", **quick)
    run({"base": models["base"]}, texts, tmp_path / "one", **quick)
    assert run({"kvcat": models["kvcat"]}, texts, tmp_path / "one", **quick) == both


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": (0,)}, "0 slots are outside 1 to 12"),
        ({"slots": (13,)}, "13 slots are outside 1 to 12"),
        ({"slots": (2, 2)}, "slots 2, 2: give each number once"),
        ({"slots": ()}, "no number of slots"),
        ({"methods": []}, "no method given"),
        ({"methods": [Method("first"), Method("first")]}, "method first is asked for twice"),
        ({"methods": [Method("nothing")]}, "no compressor 'nothing'"),
        ({"models": {}}, "no model given"),
        ({"models": {"small": (tiny(0, 30), None)}}, "outside the vocabulary of model 'small', 30 tokens"),
        ({"plan": SuffixPlan(40, SUFFIX)}, r"40 \+ 4 tokens exceed the 32 positions"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_anything_is_written(models, texts, tmp_path, changes, said):
    given = {"models": models, "texts": texts, "out_dir": tmp_path / "out", **changes}
    with pytest.raises(InputError, match=said):
        run(**given)
    assert not (tmp_path / "out").exists()


def test_suffixes_that_leave_nothing_held_out_are_refused(models, tmp_path):
    rows = {"fit": [[1, 2], [3, 4]], "choice": [[5, 6]], "test": [[1, 2]]}
    for groups, role in [(rows, "test"), ({**rows, "choice": [[1, 2]], "test": [[5, 6]]}, "choice")]:
        text = PrefixSuffixes("d", "0", tuple(range(PREFIX)), {"random": groups})
        with pytest.raises(InputError, match=f"every suffix for the {role} behind token 0 of 'd' is one that"):
            run(models, [text], tmp_path / "out")


def test_a_true_continuation_that_was_fitted_to_is_no_test_and_leaves_its_prefix_out(models, tmp_path):
    fitted = {"random": {"fit": [[1, 2, 3, 4]], "choice": [[5, 6, 7, 8]], "test": [[9, 1, 1, 1]]}}
    texts = [
        PrefixSuffixes("d", "0", tuple(range(PREFIX)), {"true": {"test": [[1, 2, 3, 4]]}, **fitted}),
        PrefixSuffixes("e", "0", tuple(range(PREFIX)), {"true": {"test": [[1, 2, 3, 5]]}, **fitted}),
    ]
    records = run(models, texts, tmp_path / "two", [Method("first")], (2,))
    assert [r.values["num_outputs"] for r in records if r.method == "first" and kind_of(r) == "true"] == [0, 1] * 2
    rows = [r for r in profile_rows(records, measures=["kl"]) if (r.method, r.num_slots) == ("first", 2)]
    counts = {(r.model, r.kind): (r.num_prefixes, r.num_outputs) for r in rows}
    assert counts == {
        (model, kind): n for model in models for kind, n in [("true", (1, 1)), ("random", (2, 8)), ("all", (2, 9))]
    }
    (row,) = [r for r in rows if (r.model, r.kind) == ("kvcat", "true")]
    assert row.mean.value == row.worst > 0
    assert row.ratio.value == pytest.approx(row.worst_ratio)
    alone = run(models, texts[:1], tmp_path / "one", [Method("first")], (2,))
    rows = profile_rows(alone, measures=["kl"])
    assert all(math.isnan(r.error(s)) and r.num_outputs == 0 for r in rows if r.kind == "true" for s in STATISTICS)
    assert all(r.num_outputs == 4 and r.worst > 0 for r in rows if r.kind == "all")
    assert {r.num_slots for r in slots_needed(rows, [99.0]) if r.kind == "true"} == {None}
    assert "| base | 2 | 16.7% | " in profile_markdown(rows, slots_needed(rows, [1.0]))


def test_the_tokens_that_all_models_have_are_drawn_from(models):
    assert check_models({**models, "small": (tiny(0, 30), None)}, PLAN) == 30


def test_the_grid_of_slots_doubles_up_to_all(finished):
    assert slot_grid(128) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert slot_grid(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert slot_grid(1) == [1]


def test_the_tables_hold_every_model_kind_and_method(finished):
    rows = profile_rows(finished[1], num_resamples=50)
    needed = slots_needed(rows, [0.5])
    text = profile_markdown(rows, needed)
    assert next(line for line in text.splitlines() if line.startswith("| kvcat | 2 |")).count("|") == 11
    lines = profile_csv(rows).splitlines()
    assert len(lines) == 1 + len(rows) == 1 + 2 * 4 * 5 * (4 + 8)
    row = next(r for r in rows if r.method == "best" and r.num_slots == 2 and r.kind == "true" and r.measure == "tv")
    assert f"base,true,2,0.166667,best,tv,{row.mean.value!r},{row.mean.low!r}" in profile_csv(rows)
    assert len(needed_csv(needed).splitlines()) == 1 + 2 * 5 * 2
