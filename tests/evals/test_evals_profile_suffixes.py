import pytest
import torch
from profile_examples import PLAN, PREFIX, SUFFIX, VOCAB, drawn, noise, tiny

from kvcat.errors import InputError
from kvcat.evals.profile_suffixes import (
    PrefixSuffixes,
    SuffixPlan,
    draw_suffixes,
    prefix_windows,
    read_suffixes,
    sample_continuations,
    write_suffixes,
)


@pytest.fixture(scope="module")
def documents():
    return noise()


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture(scope="module")
def texts(documents, model):
    return drawn(model, documents)


def test_prefixes_begin_documents_before_any_document_is_used_twice(documents):
    windows = prefix_windows(documents, PLAN, 4)
    assert [(w.document, w.name) for w in windows] == [("a", "0"), ("b", "0"), ("a", "16"), ("b", "16")]
    assert len(prefix_windows([("c", list(range(32)))], PLAN, 9)) == 2
    tokens = dict(documents)
    assert all(list(w.tokens) == tokens[w.document][int(w.name) : int(w.name) + 16] for w in windows)


def test_every_kind_has_as_many_suffixes_as_were_asked_for_and_the_true_one_is_never_fitted(texts, documents):
    tokens = dict(documents)
    for text in texts:
        sizes = {kind: {role: len(rows) for role, rows in own.items()} for kind, own in text.suffixes.items()}
        assert sizes == {
            "model": {"fit": 3, "choice": 2, "test": 4},
            "true": {"test": 1},
            "other": {"fit": 3, "choice": 2, "test": 4},
            "random": {"fit": 3, "choice": 2, "test": 4},
        }
        start = int(text.name) + PREFIX
        assert text.suffixes["true"]["test"] == [tokens[text.document][start : start + SUFFIX]]


def test_pieces_from_elsewhere_overlap_neither_the_window_nor_each_other(documents):
    numbered = [(name, list(range(100 * rank, 100 * rank + len(own)))) for rank, (name, own) in enumerate(documents)]
    plan = SuffixPlan(PREFIX, SUFFIX, ("other",), ("other",), 8, 6, 7)  # all that there is room for
    (window, *_) = prefix_windows(numbered, plan, 1)
    (text,) = draw_suffixes([window], numbered, plan, tiny(0), 200)
    taken = [token for rows in text.suffixes["other"].values() for row in rows for token in row]
    assert sorted([*taken, *window.tokens]) == sorted(token for _, own in numbered for token in own)
    with pytest.raises(InputError, match=r"22 'other' suffixes of 4 tokens: outside .* there is room for 21"):
        draw_suffixes([window], numbered, SuffixPlan(PREFIX, SUFFIX, ("other",), ("other",), 8, 6, 8), tiny(0), 200)


def test_continuations_follow_the_models_own_distribution_behind_the_whole_prefix(model):
    prefix = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    found = sample_continuations(model, prefix, 5, 6, torch.Generator().manual_seed(7), 30)
    draw, stock = torch.Generator().manual_seed(7), tiny(0)
    whole = prefix.expand(5, -1)
    for _ in range(6):
        with torch.no_grad():
            probabilities = stock(whole).logits[:, -1, :30].double().softmax(-1)
        whole = torch.cat([whole, torch.multinomial(probabilities, 1, generator=draw)], 1)
    assert found.tolist() == whole[:, 9:].tolist()
    many = sample_continuations(model, prefix, 20_000, 1, torch.Generator().manual_seed(1), VOCAB).flatten()
    with torch.no_grad():
        expected = stock(prefix).logits[0, -1].softmax(-1)
    assert (many.bincount(minlength=VOCAB) / len(many) - expected).abs().sum() < 0.05


def test_the_draw_is_a_function_of_the_seed_and_kinds_have_streams_of_their_own(documents, model, texts):
    windows = prefix_windows(documents, PLAN, 2)
    assert draw_suffixes(windows, documents, PLAN, model, VOCAB) == texts
    fewer = SuffixPlan(PREFIX, SUFFIX, ("true", "random"), ("random",), 3, 2, 4)
    for text, own in zip(texts, draw_suffixes(windows, documents, fewer, model, VOCAB), strict=True):
        assert own.suffixes == {kind: text.suffixes[kind] for kind in ("true", "random")}
    other = SuffixPlan(PREFIX, SUFFIX, num_fit=3, num_choice=2, num_test=4, seed=1)
    for text, own in zip(texts, draw_suffixes(windows, documents, other, model, VOCAB), strict=True):
        assert all((own.suffixes[kind] == text.suffixes[kind]) == (kind == "true") for kind in text.suffixes)


def test_outputs_behind_tokens_that_were_fitted_or_chosen_by_are_not_held_out():
    groups = {
        "random": {"fit": [[1, 2, 3]], "choice": [[1, 2, 9], [4, 4, 4]], "test": [[1, 2, 3], [4, 5, 6], [1, 2, 9]]},
        "true": {"test": [[1, 7, 3]]},
    }
    text = PrefixSuffixes("d", "0", (0,), groups)
    assert text.held_out("random", "fit").tolist() == [[True] * 3]
    assert text.held_out("random", "choice").tolist() == [[False, False, True], [True, True, True]]
    assert text.held_out("random", "test").tolist() == [[False] * 3, [False, True, True], [False] * 3]
    assert text.held_out("true", "test").tolist() == [[False, True, True]]
    assert text.held_out("true", "choice").numel() == 0


def test_suffixes_are_read_back_for_the_same_plan_and_prefixes_only(tmp_path, documents, texts):
    windows, path = prefix_windows(documents, PLAN, 2), tmp_path / "suffixes.json"
    write_suffixes(path, PLAN, texts)
    assert [file.name for file in tmp_path.iterdir()] == ["suffixes.json"]
    assert read_suffixes(path, PLAN, windows) == texts
    with pytest.raises(InputError, match="another plan: num_test is 4 there, 5 here"):
        read_suffixes(path, SuffixPlan(PREFIX, SUFFIX, num_fit=3, num_choice=2, num_test=5), windows)
    with pytest.raises(InputError, match="other prefixes"):
        read_suffixes(path, PLAN, windows[:1])
    path.write_text("{}")
    with pytest.raises(InputError, match="is no file of suffixes"):
        read_suffixes(path, PLAN, windows)
    with pytest.raises(InputError, match="cannot read suffixes"):
        read_suffixes(tmp_path / "none.json", PLAN, windows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefix_len": 0}, "prefix_len is 0"),
        ({"suffix_len": 1}, "suffix_len is 1; it must be at least 2"),
        ({"num_choice": 0}, "num_choice is 0"),
        ({"kinds": ("model", "poem")}, "no kind of suffixes 'poem'"),
        ({"kinds": ("model", "model")}, "each once"),
        ({"fit_kinds": ()}, "at least one kind"),
        ({"fit_kinds": ("true",)}, "not fitted to the true continuation"),
        ({"kinds": ("true", "model"), "fit_kinds": ("random",)}, "fitted to 'random' suffixes, which are not among"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        SuffixPlan(**changes)


def test_a_text_too_short_for_a_window_is_refused(documents):
    with pytest.raises(InputError, match="prefix of 58 and a suffix of 4 tokens need 62, the longest of 2 documents"):
        prefix_windows(documents, SuffixPlan(58, 4), 1)
