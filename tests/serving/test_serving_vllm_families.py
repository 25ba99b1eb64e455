"""vLLM answers as kvcat does with a small random model of every supported family, one engine in a
process each, and rejects what would be wrong when it starts (``make test-vllm-more``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evicted_caches import evicted, ids, make_model

import kvcat
from kvcat.cache import CompactCache, fingerprint
from kvcat.models import save
from kvcat.serving import open_documents, request_fields
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


def main(folder):
    """Answer the requests of a folder."""
    from vllm import LLM, SamplingParams

    asked = json.loads((folder / "requests.json").read_text())
    options = asked["options"]
    extra = {"documents": options.pop("documents", str(folder / "documents"))}
    if "cache_mb" in options:
        extra["cache_mb"] = options.pop("cache_mb")
    policy = options.pop("kv_load_failure_policy", "fail")
    llm = LLM(
        str(folder / "m"),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        kv_transfer_config={
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
