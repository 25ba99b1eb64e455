"""A compact cache in llama.cpp: its logits and its greedy answers are kvcat's."""

import os
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from evicted_caches import evicted, ids, make_model, our_logits

from kvcat.cache import CompactCache, CompactLayer
from kvcat.errors import InputError
from kvcat.models import load
from kvcat.serving.llama_cpp import load_llama_cpp, write_llama_cpp

KINDS = ["qwen2", "qwen3", "llama", "kvcat-base"]
NEW = 6


def wide_model(kind="qwen2"):
    return make_model(kind, {"hidden_size": 64, "head_dim": 16} if kind == "qwen3" else {"hidden_size": 64})


class Engine:
    """llama.cpp through llama-cpp-python, on one sequence."""

    def __init__(self, path, *, flash_attention=False, half=False, sequences=1):
        api = self.api = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
        options = api.llama_model_default_params()
        options.n_gpu_layers, options.use_mmap = 0, False
        self.model = api.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, path
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_threads, options.n_threads_batch = 256 * sequences, 256, 1, 1
        options.n_seq_max, options.kv_unified = sequences, sequences == 1
        options.type_k = options.type_v = 1 if half else 0
        options.flash_attn_type = 1 if flash_attention else 0
        self.context = api.llama_init_from_model(self.model, options)
        self.sequence, self.vocab = sequences - 1, api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def logits(self, tokens, position):
        """Logits (tokens, vocab) of tokens from the position on."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), position + i, 1, 1
            batch.seq_id[i][0] = self.sequence
        assert self.api.llama_decode(self.context, batch) == 0
        rows = [list(self.api.llama_get_logits_ith(self.context, i)[: self.vocab]) for i in range(len(tokens))]
        self.api.llama_batch_free(batch)
        return torch.tensor(rows)

    def greedy(self, tokens, position, count):
        """The most likely continuation."""
        made, logits = [], self.logits(tokens, position)[-1]
        for step in range(count):
            made.append(int(logits.argmax()))
            logits = self.logits(made[-1:], position + len(tokens) + step)[-1]
        return made

    def close(self):
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """llama.cpp writes its log to the standard error of the process."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    yield
    os.dup2(saved, 2)
    os.close(saved)
    os.close(nowhere)


@pytest.fixture(scope="module")
def gguf_of(tmp_path_factory):
    """A model of a kind and its GGUF file, made once."""
    made = {}

    def make(kind):
        pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
        pytest.importorskip("gguf", reason="needs gguf")
        from gguf_files import write_gguf

        if kind not in made:
            model = load("kvcat-base", tokenizer=False)[0] if kind == "kvcat-base" else wide_model(kind)
            made[kind] = model, write_gguf(model, tmp_path_factory.mktemp("gguf") / f"{kind}.gguf")
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["rerotated", "original"])
@pytest.mark.parametrize("flash_attention", [False, True])
def test_logits_and_greedy_answers_on_the_injected_cache_are_kvcats(
    gguf_of, tmp_path, kind, positions, flash_attention
):
    model, path = gguf_of(kind)
    cache, suffix = evicted(model, ids(1, 60), 9), ids(1, NEW, seed=6)
    options = {"positions": positions, "dtype": "float32", "flash_attention": flash_attention}
    write_llama_cpp(cache, model, tmp_path / "state", **options)
    with closing(Engine(path, flash_attention=flash_attention)) as running:
        start = load_llama_cpp(running.context, tmp_path / "state")
        assert start == (9 if positions == "rerotated" else 60)
        found, wanted = running.logits(suffix[0], start), our_logits(model, cache, suffix)[0]
        # llama.cpp's flash attention rounds to half precision
        tolerance = 5e-2 if flash_attention else 1e-3
        assert torch.allclose(found, wanted, atol=tolerance, rtol=0)
        load_llama_cpp(running.context, tmp_path / "state")
        made = running.greedy(suffix[0], start, 8)
    expected = model.generate(**cache.inputs(model, suffix), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made == expected[0, NEW:].tolist()


def test_a_half_precision_cache_of_several_streams_is_loaded_into_any_sequence(gguf_of, tmp_path):
    model, path = gguf_of("qwen2")
    cache, suffix = evicted(model, ids(1, 60), 9), ids(1, NEW, seed=6)
    write_llama_cpp(cache, model, tmp_path / "state", flash_attention=False, num_streams=3)
    with closing(Engine(path, half=True, sequences=3)) as running:
        start = load_llama_cpp(running.context, tmp_path / "state", sequence=2)
        assert torch.allclose(running.logits(suffix[0], start), our_logits(model, cache, suffix)[0], atol=2e-2, rtol=0)


def test_the_file_is_what_llama_cpp_itself_saves(gguf_of, tmp_path):
    model, path = gguf_of("llama")
    tokens = ids(1, 20)
    cache = evicted(model, tokens, num_slots=20)
    write_llama_cpp(cache, model, tmp_path / "ours", dtype="float32", flash_attention=False, placeholder=7)
    with closing(Engine(path)) as running:
        running.logits(tokens[0], 0)
        prompt = (running.api.llama_token * 20)(*[7] * 20)
        name = str(tmp_path / "theirs").encode()
        assert running.api.llama_state_seq_save_file(running.context, name, 0, prompt, 20)
    ours_, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    assert len(ours_) == len(theirs)
    head = 3 * 4 + 20 * 4 + 2 * 4 + 20 * 12 + 2 * 4 + 12
    assert ours_[:head] == theirs[:head]
    rows = [torch.frombuffer(bytearray(x[head : head + 20 * 32 * 4]), dtype=torch.float32) for x in (ours_, theirs)]
    assert torch.allclose(*rows, atol=1e-4)


def test_a_state_for_another_engine_is_refused(gguf_of, tmp_path):
    model, path = gguf_of("qwen2")
    write_llama_cpp(evicted(model, ids(1, 60), 9), model, tmp_path / "half", flash_attention=False)
    write_llama_cpp(evicted(model, ids(1, 60), 9), model, tmp_path / "rows", dtype="float32")
    (tmp_path / "cut").write_bytes((tmp_path / "rows").read_bytes()[:500])
    with closing(Engine(path)) as running:
        for name in ("half", "rows", "cut"):
            with pytest.raises(InputError, match=f"llama.cpp refuses .*{name}"):
                load_llama_cpp(running.context, tmp_path / name)
        with pytest.raises(InputError, match="no sequence state"):
            load_llama_cpp(running.context, tmp_path / "gone")


def test_what_llama_cpp_cannot_hold_is_refused(tmp_path):
    model = wide_model()
    cache, biased = evicted(model, ids(1, 30), 9), evicted(model, ids(1, 30), log_bias=True)
    large = CompactCache([CompactLayer(x.keys, x.values * 1e9) for x in cache.layers], 30, cache.fingerprint)
    uneven = evicted(model, ids(1, 30), (4, 9))
    for wrong, options, told in (
        (biased, {}, "has a log-bias"),
        (large, {}, r"too large for torch\.float16"),
        (evicted(model, ids(2, 30)), {}, "one sequence a file, not 2 examples"),
        (uneven, {}, "layers of 4 to 9 slots: llama.cpp holds equally many cells in every layer; .* budgets=equal"),
        (cache, {"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, not 'int8'"),
        (cache, {"num_streams": 0}, "num_streams must be at least 1, not 0"),
        (cache, {"positions": "none"}, "positions must be"),
    ):
        with pytest.raises(InputError, match=told):
            write_llama_cpp(wrong, model, tmp_path / "state", **options)
    other = make_model("cohere")
    with pytest.raises(InputError, match=r"no layout of llama\.cpp's cache is known for cohere models; for: llama"):
        write_llama_cpp(evicted(other, ids(1, 30)), other, tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_without_llama_cpp_python_or_with_another_format_the_loader_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(InputError, match="llama-cpp-python is not installed"):
        load_llama_cpp(None, tmp_path / "state")
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(LLAMA_STATE_SEQ_VERSION=4))
    with pytest.raises(InputError, match="sequence states of version 4, kvcat of 3"):
        load_llama_cpp(None, tmp_path / "state")
