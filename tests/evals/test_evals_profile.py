import math

import numpy as np
import pytest
import torch
from test_evals_runner import tiny

from kvcat.errors import InputError
from kvcat.evals import Method, Record, evaluate, read_records
from kvcat.evals.profile import (
    Plan,
    Prefix,
    ProfileTask,
    draw_prefixes,
    make_task,
    output_kl,
    sample_continuations,
    slot_ratios,
)
from kvcat.evals.profile_table import profile_markdown, profile_table
from tiny import byte_tokenizer, stock_model

PREFIX, SUFFIX, VOCAB = 12, 4, 40
PLAN = Plan(PREFIX, SUFFIX, num_fit=3, num_choice=2, num_test=4)
METHODS = [Method("attention-matching"), Method("first"), Method("gradient", {"num_steps": 3, "init": "first"})]


def noise():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (length,), generator=draw).tolist() for name, length in [("a", 60), ("b", 40)]}


@pytest.fixture(scope="module")
def models():
    return {"base": (tiny(0), None), "kvcat": (tiny(1), None)}


@pytest.fixture(scope="module")
def task():
    return ProfileTask(tuple(draw_prefixes(noise(), PLAN, 2, tiny(0), VOCAB)), "noise", PLAN)


def run(task, models, out_dir, methods=METHODS, slots=(2, 4)):
    return evaluate(task, models, methods, slot_ratios(slots, PREFIX), out_dir, progress=False)


@pytest.fixture(scope="module")
def finished(task, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "out"
    return folder, run(task, models, folder)


def outputs_behind(model, prefix, suffix, kept):
    """Log-probabilities behind the suffix when it sees the first slots only: stock attention, a mask"""
    tokens = torch.tensor([[*prefix, *suffix]])
    length = tokens.shape[1]
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[len(prefix) :, kept : len(prefix)] = False
    mask = torch.zeros(1, 1, length, length).masked_fill(~sees, -math.inf)
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits[0, len(prefix) :].double().log_softmax(-1).numpy()


@pytest.mark.parametrize(("method", "kept"), [("no-context", 0), ("first", 2), ("first", 4)])
def test_the_error_is_that_of_stock_attention_over_the_kept_slots(finished, task, method, kept):
    stock = tiny(0)
    for text in task.examples:
        (record,) = [
            r for r in finished[1]
            if (r.model, r.method, r.values["num_slots"]) == ("base", method, kept)
            and (r.document, r.example) == (text.document, text.name)
        ]  # fmt: skip
        for kind, groups in text.suffixes.items():
            errors = []
            for row, counted in zip(groups["test"], text.held_out(kind, "test").tolist(), strict=True):
                p, q = (outputs_behind(stock, text.prefix, row, n) for n in (PREFIX, kept))
                errors += [sum(np.exp(p[k]) * (p[k] - q[k])) for k in np.flatnonzero(counted)]
            assert record.values[f"{kind}_num_outputs"] == len(errors)
            assert record.values[f"{kind}_kl"] == pytest.approx(np.mean(errors), rel=2e-4)
            assert record.values[f"{kind}_kl_worst"] == pytest.approx(max(errors), rel=2e-4)


def test_with_all_slots_every_error_is_exactly_zero_and_without_any_none_is(finished):
    for record in finished[1]:
        errors = [v for k, v in record.values.items() if not k.startswith("num_") and "num_outputs" not in k]
        if record.method == "dense":
            assert set(errors) == {0.0}
        if record.method == "no-context":
            assert min(errors) > 1e-3


def test_what_is_not_finite_is_infinitely_wrong(models):
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    broken = hidden.clone()
    broken[1, 2] = torch.nan
    values = output_kl(models["base"][0], hidden, broken)
    assert values[1, 2] == math.inf
    assert values.flatten()[:-1].tolist() == [0.0] * 5


def test_one_cache_serves_every_suffix_and_gradient_steps_bring_it_nearer_where_it_is_fitted(task, models, tmp_path):
    start, trained = (Method("gradient", {"num_steps": n, "init": "first", "lr": 0.05}) for n in (0, 40))
    records = run(task, {"base": models["base"]}, tmp_path, [start, trained, Method("first")], (3,))
    fit = {}
    for record in records:
        kinds = [record.values[f"{kind}_fit_kl"] for kind in ("model", "other", "random")]
        fit.setdefault(record.method_label, []).append(sum(kinds))
    assert fit["gradient init=first lr=0.05 num_steps=0"] == pytest.approx(fit["first"], rel=1e-4)
    assert all(a < 0.9 * b for a, b in zip(fit["gradient init=first lr=0.05 num_steps=40"], fit["first"], strict=True))


def test_a_killed_run_continues_and_a_finished_one_is_only_read(task, finished, models, tmp_path, monkeypatch):
    folder, records = finished
    content = (folder / "records.jsonl").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "records.jsonl").write_bytes(content[: int(0.4 * len(content))])
    assert {r.key: r.values for r in run(task, models, tmp_path)} == {r.key: r.values for r in records}
    assert len(records) == 2 * 2 * (2 + 3 * 2)
    monkeypatch.setattr("kvcat.evals.profile.trace", None)
    assert run(task, models, folder) == records == read_records(folder)


def test_every_kind_has_its_suffixes_in_every_role_and_the_true_one_is_never_fitted(task):
    for text in task.examples:
        sizes = {kind: {role: len(rows) for role, rows in own.items()} for kind, own in text.suffixes.items()}
        each = {"fit": 3, "choice": 2, "test": 4}
        assert sizes == {"model": each, "true": {"test": 1}, "other": each, "random": each}
        start = int(text.name)
        tokens = noise()[text.document]
        assert list(text.prefix) == tokens[start : start + PREFIX]
        assert text.suffixes["true"]["test"] == [tokens[start + PREFIX : start + PREFIX + SUFFIX]]
    assert [text.document for text in task.examples] == ["a", "b"]


def test_pieces_from_elsewhere_overlap_neither_the_window_nor_each_other():
    numbered = {
        name: list(range(100 * rank, 100 * rank + len(own))) for rank, (name, own) in enumerate(noise().items())
    }
    model = tiny(0, vocab=200)
    plan = Plan(PREFIX, SUFFIX, 8, 6, 7)  # all that there is room for
    (text,) = draw_prefixes(numbered, plan, 1, model, 200)
    taken = [token for rows in text.suffixes["other"].values() for row in rows for token in row]
    window = [*text.prefix, *text.suffixes["true"]["test"][0]]
    assert sorted([*taken, *window]) == sorted(token for own in numbered.values() for token in own)
    with pytest.raises(InputError, match=r"22 'other' suffixes of 4 tokens: outside .* there is room for 21"):
        draw_prefixes(numbered, Plan(PREFIX, SUFFIX, 8, 6, 8), 1, model, 200)


def test_continuations_follow_the_models_own_distribution_behind_the_whole_prefix(models):
    model = models["base"][0]
    prefix = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    found = sample_continuations(model, prefix, 5, 6, torch.Generator().manual_seed(7), 30)
    draw, whole = torch.Generator().manual_seed(7), prefix.expand(5, -1)
    for _ in range(6):
        with torch.no_grad():
            probabilities = tiny(0)(whole).logits[:, -1, :30].double().softmax(-1)
        whole = torch.cat([whole, torch.multinomial(probabilities, 1, generator=draw)], 1)
    assert found.tolist() == whole[:, 9:].tolist()


def test_the_draw_is_a_function_of_the_seed(task):
    assert tuple(draw_prefixes(noise(), PLAN, 2, tiny(0), VOCAB)) == task.examples
    other = draw_prefixes(noise(), Plan(PREFIX, SUFFIX, 3, 2, 4, seed=1), 2, tiny(0), VOCAB)
    for text, own in zip(task.examples, other, strict=True):
        assert all((own.suffixes[kind] == text.suffixes[kind]) == (kind == "true") for kind in text.suffixes)


def test_outputs_behind_tokens_that_were_fitted_or_chosen_by_are_not_held_out():
    groups = {
        "random": {"fit": [[1, 2, 3]], "choice": [[1, 2, 9], [4, 4, 4]], "test": [[1, 2, 3], [4, 5, 6], [1, 2, 9]]},
        "true": {"test": [[1, 7, 3]]},
    }
    text = Prefix("d", "0", (0,), groups)
    assert text.held_out("random", "choice").tolist() == [[False, False, True], [True, True, True]]
    assert text.held_out("random", "test").tolist() == [[False] * 3, [False, True, True], [False] * 3]
    assert text.held_out("true", "test").tolist() == [[False, True, True]]
    used = Prefix("d", "0", (0,), {"random": {role: [[1, 2]] for role in ("fit", "choice", "test")}})
    with pytest.raises(InputError, match="every suffix for the choice behind token 0 of 'd' is one that caches"):
        ProfileTask((used,), "noise", PLAN)


def test_a_task_is_made_of_a_text_for_all_models(tmp_path):
    tokenizer = byte_tokenizer()
    model = stock_model("qwen2", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32)  # fmt: skip
    file = tmp_path / "book.txt"
    file.write_text("The cat sees a dog and a tree. " * 40)
    task = make_task({"m": (model, tokenizer)}, [str(file)], plan=PLAN, num_prefixes=2)
    assert (task.dataset, len(task.examples)) == ("book.txt", 2)
    task.check("m", model, tokenizer)
    with pytest.raises(InputError, match=r"of 40 tokens exceed the 32 positions of model 'm'"):
        make_task({"m": (model, tokenizer)}, [str(file)], plan=Plan(36, 4))
    file.write_text("The cat.")
    with pytest.raises(InputError, match="the text is too short"):
        make_task({"m": (model, tokenizer)}, [str(file)], plan=PLAN)


def test_numbers_out_of_range_are_refused():
    assert slot_ratios([], 12) == [1 / 12, 2 / 12, 4 / 12, 8 / 12]
    assert slot_ratios([4, 12, 2], 12) == [2 / 12, 4 / 12]
    for slots, said in [([2, 2], "each once"), ([0], "0 slots are outside 1 to 12")]:
        with pytest.raises(InputError, match=said):
            slot_ratios(slots, 12)
    with pytest.raises(InputError, match="suffix_len is 1; it must be at least 2"):
        Plan(suffix_len=1)


def record(slots, method, choice, test, *, document="d", model="m", kind="model", fit=0.0):
    values = {"num_slots": float(slots), f"{kind}_num_outputs": 5.0, f"{kind}_kl": test[0], f"{kind}_kl_worst": test[1]}
    if choice is not None:
        values |= {f"{kind}_choice_kl": choice[0], f"{kind}_choice_kl_worst": choice[1], f"{kind}_fit_kl": fit}
    return Record(model, "f", "float32", method, "{}", slots / 8, None, None, "text", "", document, "0", values)


def merged(records, others):
    """Records of two kinds of suffixes as one record each."""
    return [Record(**{**vars(a), "values": {**a.values, **b.values}}) for a, b in zip(records, others, strict=True)]


CACHES = [
    record(0, "no-context", (9.0, 9.0), (9.0, 9.5)),
    record(2, "snapkv", (1.0, 6.0), (2.0, 2.5)),
    record(2, "gradient", (2.0, 5.0), (1.0, 7.0)),
    record(4, "snapkv", (1.5, 3.0), (0.5, 4.0)),
    record(4, "gradient", (1.2, 8.0), (0.1, 0.2)),
    record(8, "dense", (0.0, 0.0), (0.0, 0.0)),
]


def table_of(records):
    return profile_table(records, num_resamples=50)


def best(records, kind="model", model="m"):
    table = table_of(records)
    return table[(table.method == "best") & (table.kind == kind) & (table.model == model)]


def test_the_best_cache_is_chosen_without_a_look_at_the_test_and_may_have_fewer_slots():
    curve = best(CACHES)
    assert curve.num_slots.tolist() == [0, 2, 4, 8]
    assert curve["mean"].tolist() == [9.0, 2.0, 2.0, 0.0]
    assert curve.worst.tolist() == [9.5, 7.0, 4.0, 0.0]  # by the worst: gradient at 2, snapkv at 4
    assert curve.chosen.tolist() == ["no-context at 0", "snapkv at 2", "snapkv at 2", "dense at 8"]


def test_the_best_cache_is_chosen_prefix_by_prefix_over_all_kinds_at_once():
    other = [
        record(r.values["num_slots"], r.method, (c, c), (t, t), document="e")
        for r, c, t in zip(CACHES, (9.0, 3.0, 1.0, 3.0, 1.0, 0.0), (9.0, 3.0, 0.5, 3.0, 0.5, 0.0), strict=True)
    ]
    row = best([*CACHES, *other]).iloc[1]
    assert (row["mean"], row.worst, row.num_prefixes, row.num_outputs) == (1.25, 7.0, 2, 10)
    assert (row.low, row.high) == (0.5, 2.0)
    assert row.chosen == "1 x gradient at 2, 1 x snapkv at 2"
    kinds = [
        record(r.values["num_slots"], r.method, (0.0, 0.0) if r.method == "gradient" else (4.0, 4.0), (0.3, 0.7),
               kind="random") for r in CACHES
    ]  # fmt: skip
    row = best(merged(CACHES, kinds), "all").iloc[1]
    assert (row["mean"], row.worst) == ((1.0 + 0.3) / 2, 7.0)


def test_a_kind_without_suffixes_for_the_choice_is_judged_by_the_others_choice():
    true = [record(r.values["num_slots"], r.method, None, (r.values["num_slots"], 7.0), kind="true") for r in CACHES]
    curve = best(merged(CACHES, true), "true")
    assert curve["mean"].tolist() == [0.0, 2.0, 2.0, 8.0]
    assert curve.fit_mean.isna().all()


def test_models_are_paired_with_the_first_on_the_same_prefixes():
    double = [
        record(r.values["num_slots"], r.method, (r.values["model_choice_kl"], r.values["model_choice_kl_worst"]),
               (2 * r.values["model_kl"], 3 * r.values["model_kl_worst"]), model="n") for r in CACHES
    ]  # fmt: skip
    assert best([*CACHES, *double]).ratio.isna().all()
    assert best([*CACHES, *double], model="n").ratio.tolist()[:3] == [2.0] * 3
    assert math.isnan(best([*CACHES, *double], model="n").ratio.iloc[3])  # 0 / 0
    with pytest.raises(InputError, match="model 'n' and the first one have records of different caches"):
        table_of([*CACHES[:3], *double])
    with pytest.raises(InputError, match="nothing was profiled"):
        table_of([])


def test_the_tables_hold_every_model_kind_and_method(finished):
    text = profile_markdown(profile_table(finished[1], num_resamples=50))
    for words in ("base", "kvcat", "attention-matching", "gradient init=first num_steps=3", "- true:", "random", "(1."):
        assert words in text
    assert "nan" not in text
    unseen = [Record(**{**vars(r), "values": r.values | {"true_num_outputs": 0.0}}) for r in CACHES]
    assert "nan" not in profile_markdown(table_of(unseen))
