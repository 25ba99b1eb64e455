import dataclasses
import json
import math

import pytest
import torch
from small_evaluations import PREFIX, SUFFIX, Characters, noise, tiny

from kvcat.compress import AttentionMatching, Eviction, replay
from kvcat.data import split_of
from kvcat.errors import InputError
from kvcat.evals import CORPORA, SuffixTask, Window, corpus_documents, windows_from_documents
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.models import load


@pytest.fixture(scope="module")
def windows():
    return noise()


@pytest.fixture(scope="module")
def model():
    return tiny(0)


def test_dense_and_prefixless_nll_equal_transformers_own_and_figures_agree(model, windows):
    prepared = SuffixTask(tuple(windows), "noise").prepare(model, None, windows)
    for window, values in zip(
        windows, prepared.score(AttentionMatching()(prepared.trace, keep_ratio=0.25)), strict=True
    ):
        tokens = torch.tensor([window.tokens])
        with torch.no_grad():
            full = -model(tokens).logits[0].log_softmax(-1)
            alone = -model(tokens[:, PREFIX:]).logits[0].log_softmax(-1)
        dense = [float(full[i - 1, tokens[0, i]]) for i in range(PREFIX, PREFIX + SUFFIX)]
        none = [float(alone[i - 1, tokens[0, PREFIX + i]]) for i in range(1, SUFFIX)]
        assert values["nll_dense"] == pytest.approx(sum(dense) / SUFFIX, abs=1e-5)
        assert values["nll_none"] == pytest.approx(sum(none) / (SUFFIX - 1), abs=1e-5)
        assert values["context_gain"] == pytest.approx(
            (sum(none) - sum(dense[1:])) / (SUFFIX - 1), abs=1e-5
        )
        assert values["delta_nll"] == pytest.approx(values["nll"] - values["nll_dense"], abs=1e-5)
        ppl = math.exp(values["nll"]) - math.exp(values["nll_dense"])
        assert values["delta_ppl"] == pytest.approx(ppl, rel=1e-4, abs=1e-3)


def test_the_first_half_of_the_suffix_supervises_and_the_second_is_scored(model, windows):
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
        scored = slice(3, 6)
        targets = tokens[row, PREFIX + 4 :]
        kl = (dense[row, scored].exp() * (dense[row, scored] - compact[row, scored])).sum(-1).mean()
        means = [
            -x[row, 3:5].gather(-1, targets[:, None]).mean().item() for x in (compact, dense, alone)
        ]
        assert values["kl"] == pytest.approx(kl.item(), abs=1e-5)
        assert [values[n] for n in ("nll", "nll_dense", "nll_none")] == pytest.approx(
            means, abs=1e-5
        )


def test_a_reconstruction_supervises_without_a_look_at_the_suffix(tiny_folder):
    model, tokenizer = load(tiny_folder)
    tokens = torch.randint(20, 200, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [Window(str(i), "0", tuple(row), 16) for i, row in enumerate(tokens)]
    prepared = SuffixTask(tuple(windows), "noise", "reconstruction").prepare(
        model, tokenizer, windows
    )
    ids = prepared.trace.input_ids
    assert ids[:, :16].tolist() == ids[:, -16:].tolist() == [row[:16] for row in tokens]
    assert prepared.trace.text.supervision_start == ids.shape[1] - 16
    whole, quarter = (
        prepared.score(Eviction("first")(prepared.trace, keep_ratio=k)) for k in (1.0, 0.25)
    )
    assert all(
        values["kl"] == pytest.approx(0.0, abs=1e-6) and values["top1"] == 1.0 for values in whole
    )
    assert all(values["kl"] > 1e-6 for values in quarter)


def test_at_most_two_windows_are_of_one_document(tiny_folder, texts_folder):
    model, tokenizer = load(tiny_folder)
    task = Suffix.task(
        tokenizer, str(texts_folder / "00.txt"), split="all", prefix=20, suffix=8, windows=3
    )
    assert (task.dataset, len(task.examples)) == ("00.txt:all", 2)
    task.check("base", model, tokenizer)


DOCUMENTS = [(f"d{i}", "".join(chr(200 * i + j) for j in range(20 + 10 * i))) for i in range(4)]


def draw(**changes):
    settings = {"prefix_len": 8, "suffix_len": 4, "per_document": 2, "seed": 1, **changes}
    return windows_from_documents(DOCUMENTS, Characters(), **settings)


def test_windows_do_not_overlap_and_the_seed_draws_them_from_different_documents_first():
    texts = dict(DOCUMENTS)
    starts = {}
    for window in draw(per_document=9):
        start = int(window.name)
        assert [chr(t) for t in window.tokens] == list(texts[window.document][start : start + 12])
        assert (window.prefix_len, window.suffix_len) == (8, 4)
        starts.setdefault(window.document, []).append(start)
    assert {name: len(of) for name, of in starts.items()} == {"d0": 1, "d1": 2, "d2": 3, "d3": 4}
    assert all(
        b - a >= 12
        for of in starts.values()
        for a, b in zip(sorted(of), sorted(of)[1:], strict=False)
    )
    assert len({window.document for window in draw(limit=4)}) == 4
    assert [w.document for w in draw()][:4] == [w.document for w in draw(limit=4)]
    assert len(draw(limit=3)) == 3
    assert draw() == draw() != draw(seed=2)


def source(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def test_lines_of_wikitext_become_articles_from_heading_to_heading(tmp_path, monkeypatch):
    lines = [
        " = 1 = \n",
        " First . \n",
        " = = Part = = \n",
        " Second . \n",
        " = 1 = \n",
        " Third . \n",
    ]
    monkeypatch.setitem(
        CORPORA, "wikitext-103", source(tmp_path / "wiki.jsonl", ["before\n", *lines])
    )
    articles = corpus_documents("wikitext-103", "all", 9)
    assert [text for _, text in articles] == ["".join(lines[:4]), "".join(lines[4:])]
    assert [name.split(" ", 1)[1] for name, _ in articles] == ["1", "1"]
    assert len({name for name, _ in articles}) == 2
    monkeypatch.setitem(
        CORPORA, "arxiv", source(tmp_path / "arxiv.jsonl", ["a paper", "another"], "article")
    )
    assert [text for _, text in corpus_documents("arxiv", "all", 9)] == ["a paper", "another"]
    monkeypatch.setitem(
        CORPORA, "fineweb-edu", source(tmp_path / "web.jsonl", [f"page {i}" for i in range(90)])
    )
    held_out = [name for name, _ in corpus_documents("fineweb-edu", "test", 90)]
    assert {split_of(name) for name in held_out} == {"test"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="Hub"):
        corpus_documents("pg-19", "all", 4)


@pytest.mark.network
@pytest.mark.parametrize("name", CORPORA)
def test_the_hub_has_the_corpora(name):
    assert len(corpus_documents(name, "all", 2)) == 2
