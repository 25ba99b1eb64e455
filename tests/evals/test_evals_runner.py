from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_evaluations import PREFIX, noise, tiny

from kvcat import precision
from kvcat.cache import fingerprint
from kvcat.compress import CalibratedBudgets, Eviction, fitting
from kvcat.compress.solvers import fit_values
from kvcat.errors import InputError
from kvcat.evals import (
    Method,
    SuffixTask,
    compare_models,
    evaluate,
    models_of,
    read_config,
    read_costs,
    read_events,
    read_records,
    summarise,
)
from kvcat.evals import runner as runner_module
from kvcat.evals.evaluations.suffix import PreparedWindows
from kvcat.models import decoder_layers
from tiny import refusal

METHODS = ["attention-matching", Method("random"), Method("gradient", {"num_steps": 2}, (0.5,), 2)]


@pytest.fixture(scope="module")
def windows():
    return noise()


@pytest.fixture(scope="module")
def models():
    return {"base": (tiny(0), None), "kvcat": (tiny(1), None)}


def run(models, windows, out_dir, methods=METHODS, keep_ratios=(0.25, 0.5), **options):
    settings = {"batch_size": 3, "progress": False, **options}
    task = SuffixTask(tuple(windows), settings.pop("dataset", "noise"))
    return evaluate(task, models, methods, keep_ratios, out_dir, **settings)


def keyed(records):
    return {record.key: record.values for record in records}


@pytest.fixture(scope="module")
def finished(models, windows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "out"
    return folder, run(models, windows, folder)


def test_every_model_method_ratio_and_window_has_its_record(finished):
    folder, records = finished
    assert records == read_records(folder)
    counts = Counter((record.method, record.keep_ratio, record.step) for record in records)
    wanted = {
        (method, keep, None): 10
        for method in ("attention-matching", "random")
        for keep in (0.25, 0.5)
    }
    assert counts == wanted | {("gradient", 0.5, step): 4 for step in (0, 1, 2)}
    start, end = read_events(folder)
    assert (start["event"], start["torch"], end["event"]) == ("start", torch.__version__, "end")


def test_a_gpus_passes_are_in_tf32_and_fits_are_not_and_the_record_says_so(
    models, windows, tmp_path, monkeypatch
):
    monkeypatch.setattr(precision, "_uses_tf32", lambda _device: True)
    seen = {"passes": set(), "fits": set()}

    def note(place, result=None):
        seen[place].add(torch.get_float32_matmul_precision())
        return result

    model, _ = models["base"]
    monkeypatch.setattr(
        fitting,
        "fit_values",
        lambda *inputs, **options: note("fits", fit_values(*inputs, **options)),
    )
    hook = decoder_layers(model)[0].register_forward_hook(lambda *_: note("passes"))
    with hook:
        run({"base": (model, None)}, windows, tmp_path / "out")
    assert seen == {"passes": {"high"}, "fits": {"highest"}}
    assert torch.get_float32_matmul_precision() == "highest"
    assert [event.get("float32") for event in read_events(tmp_path / "out")] == ["tf32", None]


def test_a_call_that_computes_nothing_is_not_among_the_sources_of_the_records(
    finished, models, windows
):
    folder, records = finished
    events = read_events(folder)
    assert run(models, windows, folder) == records
    assert read_events(folder) == events


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("attention-matching", "budgets", "{}"),
        ("gradient", "init", "attention-matching,budgets={}"),
    ],
)
def test_a_folder_is_not_continued_with_other_budgets_in_a_file_of_the_same_name(
    windows, tmp_path, name, option, text
):
    models = {"base": (tiny(0), None)}
    errors = (((4.0, 1.0), (3.0, 2.0)), ((1.0, 0.0), (1.0, 0.0)))
    weights = fingerprint(models["base"][0])
    budgets = CalibratedBudgets("tiny", weights, 1, PREFIX, (1, PREFIX), errors)
    budgets.save(tmp_path / "b.json")
    options = {option: text.format(tmp_path / "b.json")}
    if name == "gradient":
        options["num_steps"] = 1
    task = (models, windows, tmp_path / "out", [Method(name, options)], [0.5])
    assert run(*task) == run(*task)
    replace(budgets, errors=errors[::-1]).save(tmp_path / "b.json")
    message = refusal(run, *task)
    assert "results of another configuration: budgets is" in message
    assert budgets.digest[:16] in message


def test_budgets_that_change_during_a_run_end_it_before_they_are_recorded(
    windows, tmp_path, monkeypatch
):
    models = {"base": (tiny(0), None)}
    errors = (((4.0, 1.0), (3.0, 2.0)), ((1.0, 0.0), (1.0, 0.0)))
    weights = fingerprint(models["base"][0])
    budgets = CalibratedBudgets("tiny", weights, 1, PREFIX, (1, PREFIX), errors)
    budgets.save(tmp_path / "b.json")
    prepare = SuffixTask.prepare
    calls = []

    def prepare_and_replace_the_budgets(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            replace(budgets, errors=errors[::-1]).save(tmp_path / "b.json")
        return prepare(self, *arguments)

    monkeypatch.setattr(SuffixTask, "prepare", prepare_and_replace_the_budgets)
    methods = [Method("attention-matching", {"budgets": str(tmp_path / "b.json")})]
    message = refusal(run, models, windows, tmp_path / "out", methods, [0.5])
    assert "budgets of attention-matching changed during the run" in message
    assert len(read_records(tmp_path / "out")) == 3


@pytest.mark.parametrize("kept", [0.0, "step 0"])
def test_a_killed_run_continues_to_the_same_records(
    finished, models, windows, tmp_path, kept, monkeypatch
):
    folder, records = finished
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    content = (folder / "records.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    last = max(
        i for i, record in enumerate(records) if record.step == 0
    )  # between two steps of an example
    surviving = (
        b"".join(lines[: last + 1]) if kept == "step 0" else content[: int(kept * len(content))]
    )
    (tmp_path / "records.jsonl").write_bytes(surviving)
    assert keyed(run(models, windows, tmp_path)) == keyed(records)
    again = (tmp_path / "records.jsonl").read_bytes()
    assert (
        again == content if not kept else len(again.splitlines()) == len(lines)
    )  # one seed writes the same bytes
    # a finished run is read, not repeated
    monkeypatch.setattr("kvcat.compress.trace", None)
    assert len(run(models, windows, tmp_path)) == len(records)


@pytest.mark.slow
def test_shards_together_give_the_records_of_the_whole_to_the_last_bit(
    finished, models, windows, tmp_path
):
    done = [len(run(models, windows, tmp_path, shard=(index, 3))) for index in range(3)]
    assert 0 < done[0] < done[-1] == len(finished[1])
    assert keyed(read_records(tmp_path)) == keyed(finished[1])
    assert run(models, windows, tmp_path) == read_records(tmp_path)


def test_several_seeds_are_several_records_of_methods_that_draw_and_one_of_others(
    models, windows, tmp_path
):
    methods = [
        "random",
        "first",
        "attention-matching",
        Method("attention-matching", {"num_queries": 2}),
    ]
    base = {"base": models["base"]}
    records = run(base, windows, tmp_path, methods, (0.25,), seeds=(0, 1))
    assert {(r.method_label, r.seed) for r in records} == {
        ("random", 0),
        ("random", 1),
        ("first", None),
        ("attention-matching", None),
        ("attention-matching num_queries=2", 0),
        ("attention-matching num_queries=2", 1),
    }
    table = summarise(records, num_resamples=9).set_index(["method", "metric"])
    assert table.loc[("random", "kl")].num_examples == 5
    mean = sum(r.values["kl"] for r in records if r.method == "random") / 10
    assert table.loc[("random", "kl")].value == pytest.approx(mean)
    assert len({r.values["kl"] for r in records if r.method == "random" and r.example == "0"}) == 2


def test_costs_are_those_of_the_first_batch_in_a_warm_process(
    models, windows, tmp_path, monkeypatch, caplog
):
    calls = []
    made = Eviction.fit
    monkeypatch.setattr(Eviction, "fit", lambda *args: calls.append(args[2]) or made(*args))
    run({"base": models["base"]}, windows, tmp_path, ["first"], (0.25,), speed=True, batch_size=2)
    (cost,) = read_costs(tmp_path)
    assert (
        len(calls) == 1 + cost["runs"] + 2 > 4
    )  # warm-up, measured runs, and the two other batches
    assert (cost["examples"], cost["step"]) == (2, None)
    assert cost["seconds"] > 0
    assert cost["bytes"] < cost["dense_bytes"] / 2
    assert "ttft" not in cost  # 12 + 48 positions exceed the model's 32
    assert caplog.messages == [
        "first at keep ratio 0.25: an answer would exceed the model's positions: not timed"
    ]


def test_the_speed_of_methods_that_were_scored_before_is_not_measured_and_a_warning_says_so(
    models, windows, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(runner_module, "answer_speed", lambda *_: {"tokens_per_s": 1.0})
    one = {"base": models["base"]}
    run(one, windows, tmp_path / "a", ["first"], (0.25,))
    run(one, windows, tmp_path / "a", ["first"], (0.25,), speed=True)
    assert caplog.messages == [
        f"the speed of answers with first on 'base' is not measured: {tmp_path / 'a'} has its "
        "scores already"
    ]
    caplog.clear()
    for _ in range(2):
        run(one, windows, tmp_path / "b", ["first"], (0.25,), speed=True)
    assert not caplog.messages


def test_a_model_may_be_added_under_a_new_label_and_is_paired_with_the_others(
    models, windows, tmp_path
):
    run({"base": models["base"]}, windows, tmp_path, ["first"])
    records = run({"kvcat": models["kvcat"]}, windows, tmp_path, ["first"])
    table = compare_models(records, "base", num_resamples=9)
    assert set(table.model) == {"kvcat"}
    assert set(table.num_examples) == {5}
    assert list(models_of(records)) == ["base", "kvcat"]
    with pytest.raises(InputError, match="another model 'base'"):  # before the new one is evaluated
        run({"new": models["base"], "base": models["kvcat"]}, windows, tmp_path, ["first"])
    assert list(models_of(read_records(tmp_path))) == ["base", "kvcat"]


def test_the_primary_cell_is_named_before_the_run_and_another_configuration_is_rejected(
    finished, models, windows, tmp_path
):
    first = {"method": "attention-matching", "keep_ratio": 0.25, "metric": "kl"}
    assert read_config(finished[0])["primary"] == first
    for changes, said in (
        ({"primary": ("random", 0.5, "nll")}, "primary is"),
        ({"seeds": [7]}, r"seeds is \[0\] there, \[7\] here"),
        ({"methods": ["random"]}, "methods is"),
        ({"windows": noise()[::-1]}, "manifest is"),
    ):
        with pytest.raises(InputError, match=said):
            run(models, **{"windows": windows, "out_dir": finished[0], **changes})
    for cell, said in [
        (("random", 0.3, "kl"), "random at keep ratio 0.3"),
        (("random", 0.5, "acc"), "no metric of the primary cell 'acc'"),
    ]:
        with pytest.raises(InputError, match=said):
            run(models, windows, tmp_path, primary=cell)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_ratios": (0.0,)}, r"keep_ratio must be in \(0, 1\], not 0.0"),
        ({"keep_ratios": (), "methods": ["first"]}, "no method or keep ratio"),
        ({"methods": ["magic"]}, "magic"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seeds": ()}, "no seed"),
        ({"shard": (2, 2)}, "shard 2 of 2"),
        ({"windows": []}, "no example"),
        ({"models": {}}, "no model"),
        (
            {"models": {"base": (tiny(0, vocab_size=10), None)}},
            "outside the vocabulary of model 'base'",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(models, windows, tmp_path, changes, said):
    with pytest.raises(InputError, match=said):
        run(out_dir=tmp_path / "out", **{"models": models, "windows": windows, **changes})
    assert not (tmp_path / "out").exists()


def test_a_score_that_is_not_a_number_ends_the_run_in_one_line(
    models, windows, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        PreparedWindows, "score", lambda self, _: [{"kl": float("nan")}] * len(self.batch)
    )
    with pytest.raises(
        InputError, match=r"model 'base', first at keep ratio 0.5: kl .* is nan, not a number"
    ) as error:
        run(models, windows, tmp_path, ["first"], (0.5,))
    assert "\n" not in str(error.value)
