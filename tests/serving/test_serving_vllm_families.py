"""vLLM answers as kvcat does with a small random model of every supported family, one engine in a
process each, and rejects what would be wrong when it starts (``make test-vllm-more``)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from evicted_caches import evicted, ids, make_model
from transformers import AttentionInterface

import kvcat
from kvcat.cache import CompactCache, fingerprint
from kvcat.models import save
from kvcat.serving import open_documents, request_fields
from kvcat.serving.placing import Share, place, rotation_model
from tiny import byte_tokenizer

pytest.importorskip("vllm", reason="needs vLLM (make test-vllm-more)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NEW = 24
TEXTS = ["the cat sees", "a small tree that was", "then it was old and the dog finds it " * 3]
GEMMA = {
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "std": 0.05,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "smollm3": {},
    "phi3": {},
    "gemma3_text": GEMMA,
}
LONGROPE = {
    "rope_parameters": {
        "rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16, "original_max_position_embeddings": 128,
    },
    "original_max_position_embeddings": 128,
}  # fmt: skip
REJECTED = {
    "longrope": ("phi3", LONGROPE, {}, "depend on the length"),
    "pipeline": ("llama", {}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "speculative": (
        "llama", {}, {"speculative_config": {
            "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,
        }}, "speculative decoding",
    ),
    "store": ("llama", {}, {"documents": "/nowhere"}, "no folder of documents"),
    "bound": ("llama", {}, {"cache_mb": -1}, "cache_mb must be"),
    "recompute": (
        "llama", {}, {"kv_load_failure_policy": "recompute"}, "kv_load_failure_policy recompute",
    ),
}  # fmt: skip
# model, options of vLLM, type of the codes in pages, scales of keys and values, and a bound on the
# mean error of the log-probabilities of an answer; 16 bits need quieter weights than 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUIET = ("llama", {"std": 0.1})
PAGES = {
    "float32, e4m3": (
        ("qwen3", {"head_dim": 32}), {"kv_cache_dtype": "fp8"}, E4M3, (1.0, 1.0), 3e-3,
    ),
    "float32, e5m2": (
        ("gemma3_text", GEMMA), {"kv_cache_dtype": "fp8_e5m2"}, E5M2, (1.0, 1.0), 3e-3,
    ),
    "bfloat16": (QUIET, {"dtype": "bfloat16"}, None, (1.0, 1.0), 0.03),
    "bfloat16, e4m3": (
        QUIET, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, E4M3, (1.0, 1.0), 0.06,
    ),
    "bfloat16, e5m2": (
        QUIET, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, E5M2, (1.0, 1.0), 0.1,
    ),
    "float16, a checkpoint with scales": (
        QUIET, {"dtype": "float16"}, E4M3, (0.043, 0.021), 0.05,
    ),
}  # fmt: skip


def model_of(kind, options, folder):
    """A small model, saved with a tokenizer."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 128, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    save(make_model(kind, {**sizes, "num_hidden_layers": 4, **options}), tokenizer, folder / "m")
    return kvcat.load(folder / "m")[0], tokenizer


def engine(folder, requests, **options):
    """The process of an engine that answers requests, which are in a file."""
    (folder / "requests.json").write_text(json.dumps({"requests": requests, "options": options}))
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    if options.get("is_stock"):
        quiet["VLLM_PLUGINS"] = ""  # vLLM loads no plug-in
    return subprocess.run(
        [sys.executable, __file__, folder],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_answered_with_unequal_heads_as_by_kvcat(kind, tmp_path):
    model, tokenizer = model_of(kind, FAMILIES[kind], tmp_path)
    (tmp_path / "documents").mkdir()
    caches = {None: None}
    for name, length in {"a": 90, "b": 61}.items():
        document = kvcat.trace(model, ids(1, length, seed=length), supervision="self")
        file = tmp_path / "documents" / f"{name}.safetensors"
        kvcat.AttentionMatching()(document, num_slots=11).save(file)
        caches[name] = CompactCache.load(file, model)
        assert not caches[name].is_uniform
    documents = open_documents(
        str(tmp_path / "documents"), model.config, lambda _: fingerprint(model)
    )
    requests = []
    wanted = []
    for text in TEXTS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for name, cache in caches.items():
            fields = {"prompt": tokens}
            if name is not None:
                fields = request_fields(documents.find(name), name, tokens)
            requests.append(fields)
            row = torch.tensor([tokens])
            inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
            inputs = inputs if cache is None else cache.inputs(model, row)
            made = model.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            scores = [step.log_softmax(-1).max().item() for step in made.logits]
            wanted.append((made.sequences[0, len(tokens) :].tolist(), scores))
    assert len({tuple(answer) for answer, _ in wanted}) > len(TEXTS)
    done = engine(tmp_path, requests)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    for (tokens, scores), answer in zip(wanted, answers, strict=True):
        assert answer["tokens"] == tokens
        assert answer["scores"] == pytest.approx(scores, abs=2e-3)


@pytest.mark.parametrize("case", REJECTED)
def test_what_would_be_answered_wrongly_is_rejected_when_the_engine_starts(case, tmp_path):
    kind, options, engine_options, message = REJECTED[case]
    model, _ = model_of(kind, options, tmp_path)
    (tmp_path / "documents").mkdir()
    evicted(model, ids(1, 40)).save(tmp_path / "documents" / "a")
    done = engine(tmp_path, [], **engine_options)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout


def softmax_over_both(document, pages, scales):
    """An attention of transformers: one softmax over a document and over a text from position 0.

    Args:
        document: a ``DocumentLayer`` for every layer, or None.
        pages: a type of 8 bits to which the text's keys and values are truncated, or None.
        scales: what keys and values are divided by before.
    """

    def held(states, scale):
        if pages is None:
            return states
        sizes = torch.arange(256, dtype=torch.uint8).view(pages).float()
        sizes = sizes[sizes.isfinite() & (sizes >= 0)].unique()
        numbers = states.float() * (1 / torch.tensor(scale))
        next_to_zero = sizes[torch.searchsorted(sizes, numbers.abs(), right=True) - 1]
        return next_to_zero * numbers.sign() * scale

    def attend(module, query, key, value, attention_mask, scaling, **options):
        key, value = held(key, scales[0]), held(value, scales[1])
        length = query.shape[2]
        positions = torch.arange(length)[:, None]
        is_seen = torch.arange(length) <= positions
        if options.get("sliding_window"):
            is_seen &= torch.arange(length) > positions - options["sliding_window"]
        outputs = []
        first = 0
        for head in range(key.shape[1]):
            keys, values = key[0, head].double(), value[0, head].double()
            bias = torch.zeros(is_seen.shape, dtype=torch.double).masked_fill(~is_seen, -torch.inf)
            if document is not None:
                layer = document[module.layer_idx]
                slots = slice(first, first + layer.counts[head])
                first = slots.stop
                keys = torch.cat([layer.keys[slots].double(), keys])
                values = torch.cat([layer.values[slots].double(), values])
                of_slots = torch.zeros(length, layer.counts[head], dtype=torch.double)
                if layer.log_bias is not None:
                    of_slots = of_slots + layer.log_bias[slots].double()
                if layer.seen_until is not None:
                    is_out = positions >= layer.seen_until[slots]
                    of_slots = of_slots.masked_fill(is_out, -torch.inf)
                bias = torch.cat([of_slots, bias], dim=1)
            group = query.shape[1] // key.shape[1]
            queries = query[0, head * group : (head + 1) * group].double()
            weights = (queries @ keys.T * scaling + bias).softmax(-1)
            outputs.append(weights @ values)
        return torch.cat(outputs).transpose(0, 1)[None].to(query.dtype), None

    return attend


def log_probabilities(model, tokens, count, *attention):
    """Of all tokens at the last places of a text, ``softmax_over_both`` attending."""
    AttentionInterface.register("softmax_over_both", softmax_over_both(*attention))
    model.set_attn_implementation("softmax_over_both")
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -count - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("case", PAGES)
def test_pages_of_every_kind_are_read_next_to_documents_in_the_engine(case, tmp_path):
    (kind, sizes), options, pages, scales, bound = PAGES[case]
    if pages is not None and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no FP8 pages on this processor")
    model, tokenizer = model_of(kind, sizes, tmp_path)
    checkpoint = fingerprint(model)
    if scales != (1.0, 1.0):
        add_scales(tmp_path / "m", scales)
        checkpoint = fingerprint(kvcat.load(tmp_path / "m")[0])  # scales count as weights
    small = rotation_model(model.config)
    here = {"share": Share(), "dtype": torch.float32, "device": torch.device("cpu")}
    (tmp_path / "documents").mkdir()
    placed = {None: None}
    for name, length in {"a": 90, "b": 61}.items():
        document = kvcat.trace(model, ids(1, length, seed=length), supervision="self")
        cache = replace(kvcat.AttentionMatching()(document, num_slots=11), fingerprint=checkpoint)
        cache.save(tmp_path / "documents" / f"{name}.safetensors")
        placed[name] = place([cache], small, **here)
    documents = open_documents(str(tmp_path / "documents"), model.config, lambda _: checkpoint)
    asked = [(tokenizer(text, add_special_tokens=False)["input_ids"], name)
             for text in TEXTS for name in placed]  # fmt: skip
    requests = [
        {"prompt": tokens} if name is None
        else request_fields(documents.find(name), name, tokens)
        for tokens, name in asked
    ]  # fmt: skip
    # one after the other: a batch of another size rounds otherwise
    options = {**options, "max_num_seqs": 1}
    done = engine(tmp_path, requests, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    errors = []
    effects = []  # of the pages' codes
    for (tokens, name), answer in zip(asked, answers, strict=True):
        text = tokens + answer["tokens"]
        made = torch.tensor(answer["scores"])
        for kind_of_pages, differences in [(pages, errors), (None, effects)]:
            wanted = log_probabilities(model, text, NEW, placed[name], kind_of_pages, scales)
            of_answer = wanted[range(NEW), answer["tokens"]]
            differences.append((made - of_answer).abs().mean().item())
    assert max(errors) < bound
    if pages is not None:
        assert sum(effects) > 2 * sum(errors)
    alone = [fields for fields, (_, name) in zip(requests, asked, strict=True) if name is None]
    done = engine(tmp_path, alone, is_stock=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    stock = json.loads((tmp_path / "answers.json").read_text())
    assert stock == [answer for answer, (_, name) in zip(answers, asked, strict=True) if not name]


def add_scales(folder, scales):
    """Give a checkpoint scales of keys and values, as llm-compressor writes them."""
    config = json.loads((folder / "config.json").read_text())
    scheme = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
    }  # fmt: skip
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "SHA256SUMS").unlink()
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    for number in range(config["num_hidden_layers"]):
        for name, scale in zip("kv", scales, strict=True):
            weights[f"model.layers.{number}.self_attn.{name}_scale"] = torch.tensor([scale])
    safetensors.torch.save_file(weights, file, {"format": "pt"})


def main(folder):
    """Answer the requests of a folder."""
    from vllm import LLM, SamplingParams

    asked = json.loads((folder / "requests.json").read_text())
    options = {"dtype": "float32", **asked["options"]}
    is_stock = options.pop("is_stock", False)
    extra = {"documents": options.pop("documents", str(folder / "documents"))}
    if "cache_mb" in options:
        extra["cache_mb"] = options.pop("cache_mb")
    policy = options.pop("kv_load_failure_policy", "fail")
    llm = LLM(
        str(folder / "m"),
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        kv_transfer_config=None
        if is_stock
        else {
            "kv_connector": "kvcat",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra,
        },
        **options,
    )
    prompts = []
    params = []
    for fields in asked["requests"]:
        salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
        prompts.append({"prompt_token_ids": fields["prompt"], **salt})
        named = fields.get("kv_transfer_params")
        arguments = {"kv_transfer_params": named} if named else None
        params.append(
            SamplingParams(
                temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1, extra_args=arguments
            )
        )
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        best = [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]
        answers.append({"tokens": list(output.outputs[0].token_ids), "scores": best})
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
