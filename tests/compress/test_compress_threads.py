"""Threads that share a model get what each would get alone."""

import sys
import threading

import pytest
import torch

import kvcat
from kvcat.attention import exclusive
from kvcat.compress import Eviction
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
    cache = kvcat.AttentionMatching(budgets="equal")(trace, num_slots=8)
    return cache.layers[1].keys, cache.layers[1].values, kvcat.replay(model, cache, tokens(9))


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


@pytest.mark.parametrize("options", [{}, LONGROPE], ids=["llama", "longrope"])
def test_threads_on_one_model_get_the_results_that_they_get_alone(options):
    model = loud_model("llama", num_hidden_layers=3, **options)
    kvcat.trace(model, tokens(0), PREFIX)  # switches the attention
    jobs = [matched, trained, answered, *([] if options else [plain])] * 2
    alone = [job(model, seed) for seed, job in enumerate(jobs)]
    results = {}

    def run(seed):
        try:
            results[seed] = [jobs[seed](model, seed) for _ in range(3)]
        except Exception as error:
            results[seed] = error

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for seed, expected in enumerate(alone):
        assert not isinstance(results[seed], Exception), results[seed]
        for result in results[seed]:
            assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True)), seed


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
