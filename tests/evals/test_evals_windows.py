import pytest

from kvcat.errors import InputError
from kvcat.evals import Window, windows_from_documents


class Characters:
    def __call__(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


DOCUMENTS = [(f"d{i}", "".join(chr(200 * i + j) for j in range(20 + 10 * i))) for i in range(4)]


def draw(**changes):
    settings = {"prefix_len": 8, "suffix_len": 4, "per_document": 2, "seed": 1, **changes}
    return windows_from_documents(DOCUMENTS, Characters(), **settings)


def test_windows_are_consecutive_tokens_of_one_document_at_their_name():
    texts = dict(DOCUMENTS)
    for window in draw():
        start = int(window.name)
        assert [chr(t) for t in window.tokens] == list(texts[window.document][start : start + 12])
        assert (window.prefix_len, window.suffix_len) == (8, 4)


def test_windows_of_one_document_do_not_overlap():
    starts = {}
    for window in draw(per_document=9):
        starts.setdefault(window.document, []).append(int(window.name))
    assert {name: len(of) for name, of in starts.items()} == {"d0": 1, "d1": 2, "d2": 3, "d3": 4}
    assert all(b - a >= 12 for of in starts.values() for a, b in zip(sorted(of), sorted(of)[1:], strict=False))


def test_a_limit_takes_different_documents_first():
    assert len({window.document for window in draw(limit=4)}) == 4
    assert [w.document for w in draw()][:4] == [w.document for w in draw(limit=4)]
    assert len(draw(limit=3)) == 3


def test_one_seed_gives_the_same_windows_and_another_gives_others():
    assert draw() == draw()
    assert draw() != draw(seed=2)


def test_too_short_documents_are_refused_with_the_longest_found():
    with pytest.raises(InputError, match=r"900 \+ 4 tokens; the longest of 4 has 50"):
        draw(prefix_len=900)


def test_no_documents_are_refused():
    with pytest.raises(InputError, match="longest of 0 has 0"):
        windows_from_documents([], Characters(), prefix_len=8, suffix_len=4)


def test_documents_that_share_a_name_are_refused():
    with pytest.raises(InputError, match="share the name 'a'"):
        windows_from_documents([("a", "x"), ("b", "x"), ("a", "y")], Characters(), prefix_len=8, suffix_len=4)


@pytest.mark.parametrize(("name", "value"), [("prefix_len", 0), ("suffix_len", 1), ("limit", 0), ("per_document", 0)])
def test_lengths_and_counts_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}"):
        draw(**{name: value})


def test_a_window_without_prefix_is_refused():
    with pytest.raises(InputError, match="prefix of at least 1"):
        Window("d", "0", (1, 2, 3), 0)
