"""A compact cache in transformers' forward and generate, against stock attention head by head."""

import pytest
import torch
from transformers import DynamicCache

from kvcat.cache import (
    CACHE_NAME,
    CompactCache,
    CompactLayer,
    cache_argument,
    fingerprint,
)
from tiny import layer_of, loud_model, refusal

MODELS = {"granite": {"attention_multiplier": 0.6}, "mistral": {"sliding_window": 24}}
PREFIX = 20
COUNTS = ([[1, 5], [4, 2]], [[3, 3], [7, 1]], [[2, 6], [6, 6]])  # layer, example, head


def tiny(name="llama"):
    sizes = {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    return loud_model(name, torch.float64, **sizes, **MODELS.get(name, {}))


def made(model, form="ragged", batch=2):
    """A cache of random slots: "plain", "biased" (equal slots), "layers" (equal in a layer),
    "ragged"."""
    layers = []
    for index, counts in enumerate(COUNTS):
        draw = torch.Generator().manual_seed(index)
        if form.startswith("ragged"):
            states = [
                [
                    [torch.randn(n, *s, generator=draw).double() for n in row]
                    for row in counts[:batch]
                ]
                for s in ((8,), (8,), ())
            ]
            layers.append(layer_of(*states[: 2 if form == "ragged, no bias" else 3]))
        else:
            slots = 5 + index * (form == "layers")
            shapes = [(batch, 2, slots, 8)] * 2 + [(batch, 2, slots)] * (form == "biased")
            layers.append(
                CompactLayer(*(torch.randn(shape, generator=draw).double() for shape in shapes))
            )
    return CompactCache(layers, PREFIX, fingerprint(model))


def naive_logits(cache, ids, name="llama", padding=None):
    """Stock attention over every head's own slots, padded with hidden ones, the log-bias in the
    mask."""
    model = tiny(name)
    batch, new = ids.shape
    mask = torch.ones_like(ids) if padding is None else padding
    wide = cache.max_slots
    past = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = (torch.zeros(batch, 2, wide, 8).double() for _ in range(2))
        bias = torch.full((batch, 2, wide), -1e30).double()
        for row in range(batch):
            for head in range(2):
                slots = layer.head(min(row, cache.batch_size - 1), head)
                k, v, b = slots.keys, slots.values, slots.log_bias
                keys[row, head, : len(k)] = k
                values[row, head, : len(k)] = v
                bias[row, head, : len(k)] = 0 if b is None else b
        past.update(keys, values, index)
        full = torch.zeros(batch, 4, new, wide + new).double()
        full[..., :wide] = bias.repeat_interleave(2, dim=1).unsqueeze(2)
        causal = torch.ones(new, new).tril().bool() & mask.bool()[:, None, None, :]
        full[..., wide:] = torch.where(causal, 0.0, -1e30)
        model.model.layers[index].register_forward_pre_hook(
            lambda _module, args, kwargs, full=full: (args, {**kwargs, "attention_mask": full}),
            with_kwargs=True,
        )
    positions = PREFIX + (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, **cache_argument(past), position_ids=positions).logits


def greedy(cache, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, naive_logits(cache, ids)[:, -1:].argmax(-1)], dim=1)
    return ids.tolist()


def questions(rows, length=7):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "form", "new"),
    [
        ("llama", "plain", 7),
        ("qwen2", "biased", 7),
        ("gemma", "ragged", 7),
        ("granite", "biased", 1),
        ("llama", "layers", 5),
        ("qwen3", "ragged", 70),
        ("llama", "ragged, no bias", 7),
    ],
)
def test_a_forward_equals_stock_attention_head_by_head(name, form, new):
    model = tiny(name)
    cache = made(model, form)
    ids = questions(2, new)
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids, name), atol=1e-10)


@pytest.mark.parametrize(
    ("form", "static_tokens"),
    [("biased", None), ("biased", 11), ("ragged", None), ("ragged, no bias", 11)],
)
def test_greedy_generation_chooses_the_naive_argmax_at_every_step(form, static_tokens):
    model = tiny()
    ids = questions(2, 3)
    cache = made(model, form)
    before = [{name: x.clone() for name, x in layer.tensors().items()} for layer in cache.layers]
    out = model.generate(
        **cache.inputs(model, ids, static_tokens=static_tokens), max_new_tokens=8, do_sample=False
    )
    assert out.tolist() == greedy(cache, ids, 8)
    torch.testing.assert_close([layer.tensors() for layer in cache.layers], before, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["plain", "biased", "ragged"])
def test_tokens_that_are_guessed_ahead_and_dropped_again_change_no_answer(form):
    model = tiny()
    ids = torch.tensor([[3, 4, 5, 3, 4]])
    cache = made(model, form, batch=1)
    for ahead in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny("mistral")}):
        out = model.generate(**cache.inputs(model, ids), max_new_tokens=8, do_sample=False, **ahead)
        assert out.tolist() == greedy(cache, ids, 8)


@pytest.mark.parametrize(("form", "static_tokens"), [("biased", 12), ("ragged", None)])
def test_left_padded_questions_are_answered_as_each_would_be_alone(form, static_tokens):
    model = tiny()
    cache = made(model, form, 1)
    texts = [[7, 3], [11, 12, 13, 14], [9, 2, 5]]
    ids = torch.tensor([[0] * (4 - len(q)) + q for q in texts])
    mask = torch.tensor([[0] * (4 - len(q)) + [1] * len(q) for q in texts])
    inputs = cache.inputs(model, ids, mask, static_tokens=static_tokens)
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for row, question in zip(out, texts, strict=True):
        assert row[4:].tolist() == greedy(cache, torch.tensor([question]), 6)[0][len(question) :]


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "static_tokens"), [("biased", None), ("biased", 12), ("ragged", None)]
)
def test_a_forward_behind_left_padding_has_the_logits_of_each_question_alone(form, static_tokens):
    model = tiny()
    cache = made(model, form, 1)
    texts = [[7, 3], [11, 12, 13, 14], [9, 2, 5]]
    ids = torch.tensor([[0] * (4 - len(q)) + q for q in texts])
    mask = (ids > 0).long()
    inputs = cache.inputs(model, ids, mask, static_tokens=static_tokens)
    logits = model(**inputs).logits
    second_turn = torch.tensor([[8, 1], [2, 6], [4, 4]])  # a second turn, after all rows
    whole_mask = torch.cat([inputs["attention_mask"], torch.ones_like(second_turn)], dim=1)
    again = {CACHE_NAME: inputs[CACHE_NAME], "attention_mask": whole_mask}
    later = model(second_turn, **again).logits
    for row, question in enumerate(texts):
        alone = naive_logits(cache, torch.tensor([[*question, *second_turn[row].tolist()]]))[0]
        assert torch.allclose(logits[row, 4 - len(question) :], alone[:-2], atol=1e-10)
        assert torch.allclose(later[row], alone[-2:], atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("form", ["biased", "ragged"])
def test_every_row_of_a_cache_serves_as_many_neighbouring_rows_of_a_batch(form):
    model = tiny()
    ids = questions(4, 3)
    cache = made(model, form)
    logits = model(ids, **cache_argument(cache.to_transformers(model))).logits
    assert torch.allclose(logits, naive_logits(cache.select([0, 0, 1, 1]), ids), atol=1e-10)


@pytest.mark.parametrize(
    ("form", "static_tokens"), [("ragged", None), ("biased", 12), ("ragged", 12)]
)
def test_three_beams_find_what_a_naive_beam_search_finds(form, static_tokens):
    model = tiny()
    ids = torch.tensor([[4, 8, 15], [16, 23, 42]])
    cache = made(model, form)
    out = model.generate(
        **cache.inputs(model, ids, static_tokens=static_tokens),
        max_new_tokens=3,
        num_beams=3,
        do_sample=False,
    )
    for row in range(2):
        row_cache = cache.select([row])
        beams = [(0.0, ids[row : row + 1])]
        for _ in range(3):
            grown = []
            for total, sequence in beams:
                log_probs = naive_logits(row_cache, sequence)[0, -1].log_softmax(-1).tolist()
                grown += [
                    (total + p, torch.cat([sequence, torch.tensor([[t]])], 1))
                    for t, p in enumerate(log_probs)
                ]
            beams = sorted(grown, key=lambda beam: -beam[0])[:3]
        assert out[row].tolist() == beams[0][1][0].tolist()


def test_a_ragged_cache_holds_only_its_slots_and_select_and_pad_keep_them():
    model = tiny()
    cache = made(model)
    total = sum(sum(map(sum, counts)) for counts in COUNTS)
    assert (cache.max_slots, cache.mean_slots, cache.is_uniform) == (7, total / 12, False)
    assert cache.nbytes == total * (8 + 8 + 1) * 8
    assert (
        sum(
            layer.keys.nbytes + layer.values.nbytes for layer in cache.to_transformers(model).layers
        )
        == 0
    )
    swapped = cache.select([1, 0, 1])
    for layer, chosen in zip(cache.layers, swapped.layers, strict=True):
        exact = {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            layer.padded().without_absent().tensors(), layer.tensors(), **exact
        )
        for row, source in enumerate([1, 0, 1]):
            for head in range(2):
                torch.testing.assert_close(
                    vars(chosen.head(row, head)), vars(layer.head(source, head)), **exact
                )
    equal = cache.select([0]).layers[1]  # heads of three slots each
    assert isinstance(equal, CompactLayer)
    assert equal.keys.shape == (1, 2, 3, 8)


def test_chosen_examples_of_a_batch_record_their_own_size():
    cache = made(tiny())
    for row in range(2):
        chosen = cache.select([row])
        slots = sum(sum(counts[row]) for counts in COUNTS) / 6
        assert float(chosen.metadata["mean_slots"]) == pytest.approx(slots, rel=1e-5)
        assert chosen.metadata["num_slots"] == str(-int(-slots // 1))
        assert float(chosen.metadata["keep_ratio"]) == pytest.approx(slots / PREFIX, rel=1e-5)


def test_examples_are_chosen_by_lists_and_by_tensors():
    cache = made(tiny())
    last = cache.select(torch.tensor([1]))
    torch.testing.assert_close(last.layers[0].tensors(), cache.select([-1]).layers[0].tensors())


def test_a_reset_drops_the_new_tokens_and_keeps_the_prefix():
    model = tiny()
    for static_tokens in (None, 6):
        past = made(model, "biased", 1).to_transformers(model, static_tokens=static_tokens)
        mask = torch.ones(1, PREFIX + 2, dtype=torch.long)
        with torch.no_grad():
            first = model(
                torch.tensor([[3, 4]]), **cache_argument(past), attention_mask=mask
            ).logits
            past.reset()
            assert torch.equal(
                model(torch.tensor([[3, 4]]), **cache_argument(past), attention_mask=mask).logits,
                first,
            )
    past = made(model, "biased", 1).to_transformers(model, read_only=True)
    with torch.no_grad():
        model(torch.tensor([[3, 4]]), **cache_argument(past))
    assert past.get_seq_length() == PREFIX


@pytest.mark.parametrize("form", ["plain", "biased", "ragged"])
def test_a_cache_loses_new_tokens_alone_and_is_never_cut_within_its_prefix(form):
    model = tiny()
    past = made(model, form, 1).to_transformers(model)
    expected = made(model, form, 1).to_transformers(model)
    with torch.no_grad():
        model(questions(1, 4), **cache_argument(past))
        for wrong in (-5, -PREFIX, 3, PREFIX - 1):
            assert f"holds {PREFIX + 4} tokens, the first {PREFIX} of them" in refusal(
                past.crop, wrong
            )
        for unchanged in (0, PREFIX + 4, PREFIX + 5, 99):
            past.crop(unchanged)
            assert past.get_seq_length() == PREFIX + 4
        past.crop(-4)
        assert past.get_seq_length() == PREFIX
        logits = model(questions(1, 3), **cache_argument(past)).logits
        assert torch.equal(logits, model(questions(1, 3), **cache_argument(expected)).logits)
    past.crop(PREFIX + 1)  # as older transformers name the length that is kept
    assert past.get_seq_length() == PREFIX + 1
