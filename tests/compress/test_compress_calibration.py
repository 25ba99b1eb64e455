"""Budgets of a model from the error curves of some documents, in a file."""

from dataclasses import replace

import pytest
import torch

from kvcat.cache import fingerprint
from kvcat.compress import (
    AttentionMatching,
    CalibratedBudgets,
    Prefix,
    calibrate,
    make_compressor,
    trace,
)
from kvcat.compress.budgets import slot_sizes
from kvcat.compress.calibration import calibration_sizes, document_curves
from kvcat.errors import InputError
from tiny import loud_model, refusal, sentences

SIZES = (1, 2, 4, 8, 11, 16, 23, 32, 45, 64)


def steps(*until):
    """Curves of one layer: each head's error is 1 up to a number of slots of 64, and then 0."""
    return tuple(tuple(float(size < number) for size in SIZES) for number in until)


@pytest.fixture
def document(model, windows):
    return trace(model, windows[:, :32], supervision="self")


@pytest.fixture
def calibrated(model):
    """Budgets by hand: of two layers of two heads, those need 16, 32, 16 of 64 slots, and one gains
    nothing."""
    return CalibratedBudgets(
        model="tiny",
        fingerprint=fingerprint(model),
        num_documents=3,
        num_tokens=64,
        sizes=SIZES,
        errors=(steps(16, 32), steps(16, 99)),
    )


def test_sizes_are_fractions_of_the_text_and_what_is_left_goes_to_the_largest_error(
    document, calibrated
):
    slots = calibrated.allocate(Prefix.of(document), 16)
    for example in range(3):
        counts = [slots[layer, example, head] for layer in range(2) for head in range(2)]
        assert counts == [8, 16, 8, 32]


def test_a_file_of_the_documents_errors_gives_the_cache_of_the_adaptive_choice(
    model, windows, tmp_path
):
    one = trace(model, windows[:1], supervision="self")
    curves = document_curves(one, slot_sizes(8, 64))
    errors = tuple(
        tuple(tuple(curves[layer, 0, head].values()) for head in range(2)) for layer in range(2)
    )
    sizes = tuple(curves[0, 0, 0])
    budgets = CalibratedBudgets("tiny", fingerprint(model), 1, 64, sizes, errors)
    budgets.save(tmp_path / "b.json")
    assert CalibratedBudgets.load(tmp_path / "b.json") == budgets
    wanted = AttentionMatching()(one, num_slots=8)
    made = make_compressor("attention-matching", budgets=str(tmp_path / "b.json"))
    cache = made(one, num_slots=8)
    for layer, expected in zip(cache.layers, wanted.layers, strict=True):
        assert torch.equal(layer.counts, expected.counts)
    assert wanted.max_slots > 8
    assert cache.metadata["budgets"] == f"b.json {budgets.digest[:12]}"
    refined = make_compressor("refined", budgets=str(tmp_path / "b.json"), num_steps=1)
    assert refined(one, num_slots=8).metadata["budgets"] == cache.metadata["budgets"]


def test_errors_are_means_over_the_first_documents_that_are_long_enough(tokenizer):
    small = loud_model(vocab_size=len(tokenizer))
    texts = ["".join(sentences(3, seed=seed)) for seed in range(3)]
    first, second = (calibrate(small, tokenizer, [text], num_tokens=24) for text in texts[:2])
    both = calibrate(small, tokenizer, ["short", *texts], num_documents=2, num_tokens=24)
    assert (both.num_documents, both.sizes) == (2, tuple(calibration_sizes(24)))
    expected = (torch.tensor(first.errors) + torch.tensor(second.errors)) / 2
    torch.testing.assert_close(torch.tensor(both.errors), expected)
    assert not torch.allclose(torch.tensor(first.errors), expected, rtol=0.01)
    with pytest.raises(InputError, match="no document has 24 tokens"):
        calibrate(small, tokenizer, ["short"], num_tokens=24)


def test_a_gradient_run_does_not_continue_after_its_file_of_budgets_changed(
    traced, calibrated, tmp_path
):
    file = tmp_path / "b.json"
    calibrated.save(file)
    init = f"attention-matching,budgets={file}"
    method = make_compressor("gradient", init=init, num_steps=1)
    method(traced, num_slots=8, resume=tmp_path / "state")
    method(traced, num_slots=8, resume=tmp_path / "state")
    replace(calibrated, errors=calibrated.errors[::-1]).save(file)
    message = refusal(method, traced, num_slots=8, resume=tmp_path / "state")
    assert f"its budgets is {calibrated.digest[:16]}, here it is" in message
