"""A killed run goes on where it was, to the same bits; what is not its state is refused."""

import dataclasses

import pytest
import torch
from test_compress_gradient import distance

from kvcat.compress import AttentionMatching, GradientCompression, trace
from kvcat.errors import InputError


class KilledError(Exception):
    pass


def killed_at(last):
    def on_step(step, kl):
        if step == last:
            raise KilledError

    return on_step


OPTIONS = [
    {},
    {"init": "random", "schedule": "cosine", "warmup_steps": 2, "freeze_first_slot": True},
    {"lr": 3.0, "patience": 1},
    {"patience": 3, "held_out": 0.25, "init": "attention-matching"},
    {"init": "attention,budgets=adaptive", "patience": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "schedule", "patience", "held out", "ragged"])
@pytest.mark.parametrize("last", [1, 5, 9])
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(traced, tmp_path, options, last):
    method = GradientCompression(num_steps=9, **options)
    whole = method(traced, num_slots=5)
    with pytest.raises(KilledError):
        method(traced, num_slots=5, resume=tmp_path / "state", save_every=2, on_step=killed_at(last))
    steps = []
    resumed = method(
        traced, num_slots=5, resume=tmp_path / "state", save_every=2, on_step=lambda step, kl: steps.append(step)
    )
    assert distance(resumed, whole) == 0
    assert steps[:1] == ([last // 2 * 2 + 1] if last < 9 else [])
    assert distance(method(traced, num_slots=5, resume=tmp_path / "state"), whole) == 0


def test_a_shared_cache_resumes_too(model, windows, tmp_path):
    found = [trace(model, torch.cat([windows[:1, :48], windows[i : i + 1, 48:]], 1), 48) for i in range(2)]
    method = GradientCompression(num_steps=6)
    with pytest.raises(KilledError):
        method.shared(found, num_slots=5, resume=tmp_path / "state", save_every=1, on_step=killed_at(4))
    resumed = method.shared(found, num_slots=5, resume=str(tmp_path / "state"))
    assert distance(resumed, method.shared(found, num_slots=5)) == 0
    with pytest.raises(InputError, match=r"its tokens is .*, here it is"):
        method(found[0], num_slots=5, resume=tmp_path / "state")


def test_a_run_that_needs_too_much_memory_goes_on_with_less(traced, tmp_path):
    method = GradientCompression(num_steps=5)
    with pytest.raises(KilledError):
        method(traced, num_slots=5, resume=tmp_path / "state", save_every=1, on_step=killed_at(3))
    lean = dataclasses.replace(method, activation_checkpointing=True, teacher_bytes=0)
    assert distance(lean(traced, num_slots=5, resume=tmp_path / "state"), method(traced, num_slots=5)) == 0


def test_half_precision_keeps_its_wide_parameters(make_model, windows, tmp_path):
    found = trace(make_model(torch.bfloat16), windows[:1], 48)
    method = GradientCompression(num_steps=5, lr=1e-4)
    with pytest.raises(KilledError):
        method(found, num_slots=5, resume=tmp_path / "state", save_every=1, on_step=killed_at(3))
    assert distance(method(found, num_slots=5, resume=tmp_path / "state"), method(found, num_slots=5)) == 0


def test_the_state_of_another_run_is_refused_in_one_line(make_model, model, windows, traced, tmp_path):
    path, method = tmp_path / "state", GradientCompression(num_steps=2)
    method(traced, num_slots=5, resume=path)
    before = path.read_bytes()
    for change, message in [
        ({"lr": 0.5}, "its lr is 0.01, here it is 0.5"),
        ({"num_steps": 3}, "its num_steps is 2, here it is 3"),
        ({"init": "random"}, "its init is first, here it is random"),
        ({"init": "snapkv,window=4"}, "its init is first, here it is snapkv,window=4"),
        ({"init": AttentionMatching()(traced, num_slots=5)}, "its init is first, here it is cache [0-9a-f]{16}$"),
    ]:
        with pytest.raises(InputError, match=message):
            dataclasses.replace(method, **change)(traced, num_slots=5, resume=path)
    with pytest.raises(InputError, match="its num_slots is 5, here it is 6"):
        method(traced, num_slots=6, resume=path)
    with pytest.raises(InputError, match=r"its model is .*, here it is"):
        method(trace(make_model(rms_norm_eps=1e-2), windows, 48), num_slots=5, resume=path)
    changed = windows.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 67
    with pytest.raises(InputError, match=r"its tokens is .*, here it is"):
        method(trace(model, changed, 48), num_slots=5, resume=path)
    assert path.read_bytes() == before


def test_a_start_of_another_cache_is_another_run(traced, tmp_path):
    one, other = (AttentionMatching(preset)(traced, num_slots=5) for preset in ("stable", "paper"))
    GradientCompression(num_steps=1, init=one)(traced, num_slots=5, resume=tmp_path / "state")
    with pytest.raises(InputError, match="its init is cache"):
        GradientCompression(num_steps=1, init=other)(traced, num_slots=5, resume=tmp_path / "state")


def test_damaged_and_foreign_files_are_refused(traced, tmp_path):
    path, method = tmp_path / "state", GradientCompression(num_steps=1)
    cache = method(traced, num_slots=5, resume=path)
    whole = path.read_bytes()
    assert b"pickle" not in whole
    method(traced, num_slots=5, resume=tmp_path / "other")
    assert whole == (tmp_path / "other").read_bytes()
    middle = len(whole) // 2
    for content, message in [
        (whole[:-9], "truncated"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "does not match|not match its checksum"),
        (whole.replace(b"kvcat-gradient-state-1", b"kvcat-gradient-state-2"), "not a state .* by this version"),
        (b"", "truncated"),
        (b"not a state", "truncated"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            method(traced, num_slots=5, resume=path)
    cache.save(tmp_path / "cache")
    with pytest.raises(InputError, match="not a state of a gradient-based run"):
        method(traced, num_slots=5, resume=tmp_path / "cache")


def test_a_state_that_cannot_be_written_is_refused_before_the_first_step(traced, tmp_path):
    for resume, save_every, message in [
        (tmp_path / "none" / "state", 10, "none/state: no such folder"),
        (tmp_path, 10, "it is a folder"),
        (tmp_path / "state", 0, "save_every must be at least 1, not 0"),
    ]:
        with pytest.raises(InputError, match=message):
            GradientCompression(num_steps=9)(
                traced, num_slots=5, resume=resume, save_every=save_every, on_step=killed_at(1)
            )  # fmt: skip
