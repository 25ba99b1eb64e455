import dataclasses
import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcat.compress import AttentionMatching, replay
from kvcat.errors import InputError
from kvcat.evals import Method, SuffixTask, Window, evaluate_suffix, models_of, read_costs, read_records
from kvcat.evals.rows import compare_models, summarise
from kvcat.models import load

PREFIX, SUFFIX, VOCAB = 12, 6, 40
METHODS = ["attention-matching", Method("random"), Method("gradient", {"num_steps": 2}, (0.5,), 2)]


def tiny(seed, vocab=VOCAB):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def windows():
    tokens = torch.randint(VOCAB, (5, PREFIX + SUFFIX), generator=torch.Generator().manual_seed(0)).tolist()
    return [Window(f"d{i % 3}", str(i), tuple(row), PREFIX) for i, row in enumerate(tokens)]


@pytest.fixture(scope="module")
def models():
    return {"base": (tiny(0), None), "kvcat": (tiny(1), None)}


def run(models, windows, out_dir, methods=METHODS, keep_ratios=(0.25, 0.5), **options):
    settings = {"dataset": "noise", "batch_size": 3, "progress": False, **options}
    return evaluate_suffix(models, windows, methods, keep_ratios, out_dir, **settings)


@pytest.fixture(scope="module")
def finished(models, windows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "out"
    return folder, run(models, windows, folder)


def test_every_model_method_ratio_and_window_has_its_record(finished):
    folder, records = finished
    assert records == read_records(folder)
    counts = {}
    for record in records:
        counts[record.method, record.keep_ratio, record.step] = (
            counts.get((record.method, record.keep_ratio, record.step), 0) + 1
        )
    gradient = {key: count for key, count in counts.items() if key[0] == "gradient"}
    assert {key: count for key, count in counts.items() if key[0] != "gradient"} == {
        (method, keep, None): 10 for method in ("attention-matching", "random") for keep in (0.25, 0.5)
    }
    assert gradient == {("gradient", 0.5, step): 4 for step in (0, 1, 2)}


def test_dense_and_prefixless_nll_equal_transformers_own(finished, models, windows):
    _, records = finished
    for record in records:
        window = next(w for w in windows if w.name == record.example)
        tokens = torch.tensor([window.tokens])
        stock = tiny(0 if record.model == "base" else 1)
        with torch.no_grad():
            full = -stock(tokens).logits[0].log_softmax(-1)
            alone = -stock(tokens[:, PREFIX:]).logits[0].log_softmax(-1)
        dense = [float(full[i - 1, tokens[0, i]]) for i in range(PREFIX, PREFIX + SUFFIX)]
        none = [float(alone[i - 1, tokens[0, PREFIX + i]]) for i in range(1, SUFFIX)]
        values = record.values
        assert values["nll_dense"] == pytest.approx(sum(dense) / SUFFIX, abs=1e-5)
        assert values["nll_none"] == pytest.approx(sum(none) / (SUFFIX - 1), abs=1e-5)
        assert values["context_gain"] == pytest.approx((sum(none) - sum(dense[1:])) / (SUFFIX - 1), abs=1e-5)


def test_per_window_figures_agree_with_each_other(finished):
    for record in finished[1]:
        v = record.values
        assert v["delta_nll"] == pytest.approx(v["nll"] - v["nll_dense"], abs=1e-5)
        assert v["delta_ppl"] == pytest.approx(math.exp(v["nll"]) - math.exp(v["nll_dense"]), rel=1e-4, abs=1e-3)
        lost, gained = v["delta_nll"] * SUFFIX, v["context_gain"] * (SUFFIX - 1)
        assert v["retention"] == pytest.approx(1 - lost / gained)


def test_keeping_every_slot_loses_nothing(models, windows, tmp_path):
    for record in run(models, windows, tmp_path, ["attention-matching", "first"], (1.0,)):
        assert record.values["kl"] == pytest.approx(0.0, abs=1e-6)
        assert record.values["top1"] == 1.0
        assert record.values["retention"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kept_bytes", [0.0, 0.31, 0.8])
def test_a_killed_run_continues_to_the_same_records_and_summary(finished, models, windows, tmp_path, kept_bytes):
    folder, records = finished
    for name in ("config.json", "provenance.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    content = (folder / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(content[: int(kept_bytes * len(content))])
    resumed = run(models, windows, tmp_path)
    assert sorted(r.key for r in resumed if r.step is None) == sorted(r.key for r in records if r.step is None)
    assert {r.key: r.values for r in resumed} == {r.key: r.values for r in records}
    assert summarise(resumed, num_resamples=50) == summarise(records, num_resamples=50)


def test_a_finished_run_is_read_and_not_repeated(finished, models, windows, monkeypatch):
    folder, records = finished
    monkeypatch.setattr("kvcat.evals.suffix.trace", None)
    assert run(models, windows, folder) == records


def test_two_runs_with_one_seed_write_the_same_bytes(finished, models, windows, tmp_path):
    run(models, windows, tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == (finished[0] / "records.jsonl").read_bytes()


def test_shards_together_give_the_records_of_the_whole_to_the_last_bit(finished, models, windows, tmp_path):
    for index in range(3):
        run(models, windows, tmp_path, shard=(index, 3))
    whole = {r.key: r.values for r in finished[1]}
    assert {r.key: r.values for r in read_records(tmp_path)} == whole
    assert summarise(read_records(tmp_path), num_resamples=50) == summarise(finished[1], num_resamples=50)
    assert run(models, windows, tmp_path) == read_records(tmp_path)
    assert not (tmp_path / "records.jsonl").read_text()


def test_several_seeds_are_several_records_and_one_row_of_their_means(models, windows, tmp_path):
    records = run({"base": models["base"]}, windows, tmp_path, ["random", "first"], (0.25,), seeds=(0, 1))
    assert {(r.method, r.seed) for r in records} == {("random", 0), ("random", 1), ("first", None)}
    row = next(row for row in summarise(records, num_resamples=9) if row.method == "random")
    assert row.num_examples == 5
    assert row["kl"].value == pytest.approx(sum(r.values["kl"] for r in records if r.method == "random") / 10)


def test_seconds_bytes_and_speed_stand_beside_the_records(models, windows, tmp_path):
    run({"base": models["base"]}, windows, tmp_path, ["first"], (0.25,), speed=True, batch_size=2)
    costs = read_costs(tmp_path)
    assert [cost["examples"] for cost in costs] == [2]
    assert all(cost["seconds"] > 0 and cost["bytes"] * 4 == cost["dense_bytes"] for cost in costs)
    assert ["ttft" in cost for cost in costs] == [False]  # 12 + 48 positions exceed the model's 32


def test_the_seed_reaches_the_methods_that_draw(models, windows, tmp_path):
    one, two = (run(models, windows, tmp_path / str(s), ["random"], (0.25,), seeds=[s]) for s in (0, 1))
    assert [r.values["kl"] for r in one] != [r.values["kl"] for r in two]


def test_a_model_may_be_added_and_is_paired_with_the_others(models, windows, tmp_path):
    run({"base": models["base"]}, windows, tmp_path, ["first"])
    loads = []
    records = run({"kvcat": lambda: loads.append(1) or models["kvcat"]}, windows, tmp_path, ["first"])
    assert loads == [1]
    assert [(row.model, row.num_examples) for row in compare_models(records, num_resamples=9)] == [("kvcat", 5)] * 2
    assert list(models_of(records)) == ["base", "kvcat"]


def test_other_weights_under_a_known_label_are_refused(models, windows, tmp_path):
    run({"base": models["base"]}, windows, tmp_path, ["first"])
    with pytest.raises(InputError, match="another model 'base': fingerprint"):
        run({"base": models["kvcat"]}, windows, tmp_path, ["first"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [7]}, r"seeds is \[0\] there, \[7\] here"),
        ({"methods": ["random"]}, "methods is"),
        ({"keep_ratios": (0.1,)}, "methods is"),
        ({"dataset": "other"}, "dataset is noise there"),
    ],
)
def test_another_configuration_into_the_same_folder_is_refused(finished, models, windows, changes, said):
    with pytest.raises(InputError, match=said):
        run(models, windows, finished[0], **changes)


def test_other_windows_into_the_same_folder_are_refused(finished, models, windows):
    with pytest.raises(InputError, match="manifest is"):
        run(models, windows[::-1], finished[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_ratios": (0.0,)}, r"keep ratio 0 is outside \(0, 1\]"),
        ({"keep_ratios": (1.5,)}, r"keep ratio 1.5"),
        ({"keep_ratios": (float("nan"),)}, r"keep ratio nan"),
        ({"keep_ratios": (0.5, 0.5)}, "twice"),
        ({"keep_ratios": (), "methods": ["first"]}, "no method or keep ratio"),
        ({"methods": ["magic"]}, "magic"),
        ({"methods": [Method("first", num_examples=0)]}, "num_examples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"windows": []}, "no example"),
        ({"models": {}}, "no model"),
        ({"models": {"base": (tiny(0, vocab=10), None)}}, "outside the vocabulary of model 'base'"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(models, windows, tmp_path, changes, said):
    settings = {"models": models, "windows": windows, **changes}
    with pytest.raises(InputError, match=said):
        run(out_dir=tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "records.jsonl").exists() or not read_records(tmp_path / "out")


def test_windows_beyond_the_models_positions_are_refused(models, tmp_path):
    with pytest.raises(InputError, match="windows of 40 tokens exceed the 32 positions of model 'base'"):
        run(models, [Window("d", "0", (1,) * 40, 30)], tmp_path)


def test_models_with_different_tokenizers_are_refused(models, windows, tmp_path):
    def words(word):
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({word: 0}, unk_token=word)))

    pairs = {label: (model, words(label)) for label, (model, _) in models.items()}
    with pytest.raises(InputError, match="'base' and 'kvcat' have different tokenizers"):
        run(pairs, windows, tmp_path, ["first"])


def test_command_versions_and_cost_stand_beside_the_results(finished):
    events = [json.loads(line) for line in (finished[0] / "provenance.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[:2]] == ["start", "end"]
    assert events[0]["torch"] == torch.__version__
    assert set(events[1]["seconds_by_method"]) == {"attention-matching", "random", "gradient"}


def test_the_first_half_of_the_suffix_supervises_and_the_second_is_scored(models, windows):
    model, _ = models["base"]
    prepared = SuffixTask(tuple(windows), "noise", "first-half").prepare(model, None, windows)
    cache = AttentionMatching()(prepared.trace, keep_ratio=0.25)
    other = [dataclasses.replace(w, tokens=(*w.tokens[:-3], 1, 2, 3)) for w in windows]
    again = SuffixTask(tuple(other), "noise", "first-half").prepare(model, None, other)
    same = AttentionMatching()(again.trace, keep_ratio=0.25)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, same.layers, strict=True))
    tokens = torch.tensor([w.tokens for w in windows])
    with torch.no_grad():
        dense = model(tokens).logits[:, PREFIX:].log_softmax(-1)
        alone = model(tokens[:, PREFIX:]).logits.log_softmax(-1)
    compact = replay(model, cache, tokens[:, PREFIX:]).log_softmax(-1)
    for row, values in enumerate(prepared.score(cache)):
        own, targets = slice(3, 6), tokens[row, PREFIX + 4 :]
        kl = (dense[row, own].exp() * (dense[row, own] - compact[row, own])).sum(-1).mean()
        means = [-x[row, 3:5].gather(-1, targets[:, None]).mean().item() for x in (compact, dense, alone)]
        assert values["kl"] == pytest.approx(kl.item(), abs=1e-5)
        assert [values[n] for n in ("nll", "nll_dense", "nll_none")] == pytest.approx(means, abs=1e-5)
        assert values["retention"] == pytest.approx(
            1 - (means[0] - means[1]) / (means[2] - means[1]), rel=1e-3, abs=1e-3
        )


def test_a_reconstruction_supervises_without_a_look_at_the_suffix(tiny_folder):
    model, tokenizer = load(tiny_folder)
    tokens = torch.randint(20, 200, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [Window(str(i), "0", tuple(row), 16) for i, row in enumerate(tokens)]
    task = SuffixTask(tuple(windows), "noise", "reconstruction")
    prepared = task.prepare(model, tokenizer, windows)
    ids = prepared.trace.input_ids
    assert ids[:, :16].tolist() == ids[:, -16:].tolist() == [row[:16] for row in tokens]
    assert prepared.trace.supervision_start == ids.shape[1] - 16
    whole, quarter = (prepared.score(AttentionMatching()(prepared.trace, keep_ratio=k)) for k in (1.0, 0.25))
    assert all(values["kl"] == pytest.approx(0.0, abs=1e-6) and values["top1"] == 1.0 for values in whole)
    assert all(values["kl"] > 0.0 for values in quarter)


def test_a_prefix_whose_repetition_exceeds_the_positions_is_refused_before_work(tiny_folder):
    model, tokenizer = load(tiny_folder)
    task = SuffixTask((Window("d", "0", (30,) * 150, 140),), "noise", "reconstruction")
    with pytest.raises(InputError, match=r"140 tokens make reconstruction sequences of .* more than the 256"):
        task.check("base", model, tokenizer)
    with pytest.raises(InputError, match="needs the tokenizer of model 'base'"):
        task.check("base", model, None)


def test_another_supervision_is_refused():
    with pytest.raises(InputError, match="supervision must be one of suffix, first-half, reconstruction, not 'both'"):
        SuffixTask((Window("d", "0", (1,) * 8, 4),), "noise", "both")
    with pytest.raises(InputError, match="at least 4 tokens"):
        SuffixTask((Window("d", "0", (1,) * 7, 4),), "noise", "first-half")
