"""Threads that share a model get what each would get alone."""

import threading

import pytest
import torch

import kvcat
from kvcat.attention import exclusive
from kvcat.compress import Eviction
from kvcat.models import decoder_layers
from tiny import loud_model

PREFIX, TOKENS = 40, 60
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 5.0, 8.0, 11.0],
        "original_max_position_embeddings": 50,
    }
}


def tokens(seed):
    return torch.randint(3, 67, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def matched(model, seed):
    trace = kvcat.trace(model, tokens(seed), PREFIX)
    cache = kvcat.AttentionMatching()(trace, num_slots=8)
    return *(layer.stream for layer in trace.layers), kvcat.replay(model, cache, tokens(9))


def trained(model, seed):
    trace = kvcat.trace(model, tokens(seed), PREFIX)
    cache = kvcat.GradientCompression(num_steps=3)(trace, num_slots=8)
    return cache.layers[1].keys, cache.layers[1].values


def answered(model, seed):
    trace = kvcat.trace(model, tokens(seed)[:, :PREFIX], supervision="self", room=TOKENS)
    cache = Eviction("streaming")(trace, num_slots=8)
    inputs = cache.inputs(model, tokens(9)[:, :5])
    return (model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0),)


def plain(model, seed):
    """A forward that knows nothing of kvcat, and waits for nobody."""
    with torch.no_grad():
        return (model(input_ids=tokens(seed)).logits,)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("options", [{}, LONGROPE], ids=["llama", "longrope"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (matched, matched),
        (matched, trained),
        (matched, answered),
        (trained, matched),
        (answered, matched),
        (matched, plain),
    ],
)
def test_a_thread_that_begins_while_another_runs_the_model_changes_neither(first, second, options):
    if options and second is plain:
        pytest.skip("transformers itself chooses the factors anew in every forward")
    model = loud_model("llama", num_hidden_layers=3, **options)
    alone = [first(model, 0), second(model, 1)]
    others, results = [], []

    def begin(*_):
        if not others:
            others.append(threading.Thread(target=lambda: results.append(second(model, 1))))
            others[0].start()
            others[0].join(0.3)  # unless it waits, it runs in the middle of this forward

    with decoder_layers(model)[1].register_forward_pre_hook(begin):
        results.append(first(model, 0))
    others[0].join()
    for expected in alone:
        equal = [all(map(torch.equal, expected, result)) for result in results]
        assert sum(equal) == 1


def test_a_model_and_its_base_have_one_lock_which_an_error_releases():
    model = loud_model()
    cache = Eviction("first")(kvcat.trace(model, tokens(0), PREFIX), num_slots=4)
    inputs = cache.inputs(model, tokens(1))
    with pytest.raises(IndexError):
        model(**{**inputs, "input_ids": torch.full((1, TOKENS), 67)})  # no such token
    with pytest.raises(kvcat.errors.InputError):
        model(**{**inputs, "attention_mask": torch.ones(1, 3)})
    free = []

    def look(module):
        with exclusive(module):
            free.append(module)

    with exclusive(model), exclusive(model.base_model):
        waiting = [threading.Thread(target=look, args=(m,)) for m in (model, model.base_model)]
        for thread in waiting:
            thread.start()
        waiting[0].join(0.2)
        assert not free
    for thread in waiting:
        thread.join(10)
    assert len(free) == 2
