"""kvcat uses nothing of transformers that is deprecated in the installed version."""

import logging
import warnings

import pytest
import torch
from transformers.utils import logging as transformers_logging

import kvcat
from kvcat.compress import Eviction, split_supervision
from kvcat.models import save
from kvcat.serving import export_prefix, widen
from tiny import loud_model

KINDS = {
    "llama": {},
    "qwen2": {},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {},
}


@pytest.fixture
def messages():
    """What transformers logs, as often as it happens."""
    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logger = transformers_logging.get_logger("transformers")
    handler = Handler()
    logger.addHandler(handler)
    transformers_logging.warning_once.cache_clear()
    yield logged
    logger.removeHandler(handler)


@pytest.mark.parametrize(("kind", "options"), KINDS.items(), ids=KINDS)
def test_tracing_replaying_and_generating_use_nothing_that_is_deprecated(
    kind, options, tokenizer, tmp_path, messages
):
    model = loud_model(kind, vocab_size=len(tokenizer), **options)
    ids = torch.arange(48)[None] + 5
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        save(model, tokenizer, tmp_path / "model")
        loaded, _ = kvcat.load(tmp_path / "model")
        whole = kvcat.trace(loaded, ids, prefix_len=32)
        fitted, _ = split_supervision(whole, 0.5)
        method = Eviction("h2o") if kind == "gemma3_text" else kvcat.AttentionMatching()
        cache = method(fitted, num_slots=20)
        kvcat.compare(whole, cache)
        kvcat.replay(loaded, cache, ids[:, 32:])
        loaded.generate(**cache.inputs(loaded, ids[:, 32:36]), max_new_tokens=3, do_sample=False)
        if kind in ("llama", "qwen2"):
            export_prefix(cache, loaded, tmp_path / "packed", head_dim=12)
            widen(loaded, 12)
            session = kvcat.Session(loaded, tokenizer, budget=24, tail=8)
            session.append("the cat sees a small tree and then it was old. " * 2)
            session.generate(max_new_tokens=3)
    outdated = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    assert [str(one.message) for one in warned if issubclass(one.category, outdated)] == []
    assert [text for text in messages if "deprecat" in text or "removed" in text] == []


def test_the_check_sees_what_transformers_deprecates(messages):
    """A name that transformers no longer wants is logged, each time that a test looks."""
    transformers_logging.get_logger("transformers.some").warning_once("x is deprecated")
    transformers_logging.warning_once.cache_clear()
    transformers_logging.get_logger("transformers.some").warning_once("x is deprecated")
    assert messages == ["x is deprecated"] * 2
