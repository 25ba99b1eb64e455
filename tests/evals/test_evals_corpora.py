import json

import pytest

from kvcat.data.documents import open_source
from kvcat.errors import InputError
from kvcat.evals import CORPORA, corpus_documents
from kvcat.evals.corpora import Corpus


def table(path, field, texts):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def test_lines_of_wikitext_become_articles_from_heading_to_heading(tmp_path):
    lines = [" = 1 = \n", " First . \n", " = = Part = = \n", " Second . \n", " = T = Three = \n", " Third . \n"]
    source = table(tmp_path / "wiki.jsonl", "text", ["before\n", *lines])
    articles = list(Corpus(source, lines=True).documents())
    assert [text for _, text in articles] == ["".join(lines[:4]), "".join(lines[4:])]
    assert [name.split(" ", 1)[1] for name, _ in articles] == ["1", "T = Three"]


def test_equal_headings_make_different_names(tmp_path):
    source = table(tmp_path / "wiki.jsonl", "text", [" = One = \n", "a\n", " = One = \n", "b\n"])
    names = [name for name, _ in Corpus(source, lines=True).documents()]
    assert len(set(names)) == 2


def test_another_column_can_hold_the_text(tmp_path):
    source = table(tmp_path / "arxiv.jsonl", "article", ["a paper", "another"])
    assert [text for _, text in Corpus(source, text_field="article").documents()] == ["a paper", "another"]


def test_a_corpus_without_network_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in CORPORA:
        with pytest.raises(InputError, match="Hub"):
            corpus_documents(name, "all", 4)


@pytest.mark.network
@pytest.mark.parametrize("name", CORPORA)
def test_the_hub_has_the_corpora(name):
    assert len(open_source(CORPORA[name].source).files) > 0
    assert len(corpus_documents(name, "all", 2)) == 2
