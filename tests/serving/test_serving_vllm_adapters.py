"""The connector's methods are those of vLLM; a request for a compact cache with a LoRA adapter is
rejected, for which vLLM need not be installed."""

import importlib.util
import inspect
import json
import sys
from types import SimpleNamespace

import pytest
from evicted_caches import evicted, ids, make_model
from vllm_modules import import_serving

from kvcat.cache import fingerprint
from kvcat.errors import InputError
from kvcat.serving import export_prefix
from kvcat.serving.requests import PLACEHOLDER, SALT, CacheFolder

pytest.importorskip("starlette")
WIDE = 32


@pytest.fixture
def serving(monkeypatch):
    yield import_serving(monkeypatch)
    sys.modules.pop("kvcat.serving.vllm", None)


@pytest.fixture
def caches(tmp_path):
    model = make_model("qwen2", {"hidden_size": 64})
    cache = evicted(model, ids(1, 40), 9)
    export_prefix(cache, model, tmp_path / "doc", head_dim=WIDE)
    layers = model.config.num_hidden_layers
    heads = model.config.num_key_value_heads
    return CacheFolder(tmp_path, fingerprint(model), (layers, heads, WIDE))


def request_for(caches, **fields):
    prefix = caches.find("doc")
    values = {
        "request_id": "1",
        "kv_transfer_params": {"kvcat": "doc"},
        "cache_salt": SALT + prefix.digest,
        "prompt_token_ids": [PLACEHOLDER] * prefix.num_slots + [3],
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "num_tokens": prefix.num_slots + 1,
    }
    return SimpleNamespace(**{**values, **fields})


def test_a_request_with_an_adapter_brings_no_slots_and_fails(serving, caches):
    connector = object.__new__(serving.CompactCacheConnector)
    connector.caches = caches
    connector._prefixes = {}
    connector.window = None
    prefix = caches.find("doc")
    assert connector._named_prefix(request_for(caches)).digest == prefix.digest
    adapted = request_for(caches, lora_request=SimpleNamespace(lora_name="a", lora_int_id=1))
    with pytest.raises(InputError, match="a request with a LoRA adapter cannot name one"):
        connector._named_prefix(adapted)
    assert connector.get_num_new_matched_tokens(adapted, 0) == (prefix.num_slots + 1, True)
    assert connector._prefixes == {"1": None}  # its load fails, and with it this request alone
    plain = request_for(
        caches, lora_request=adapted.lora_request, kv_transfer_params=None, cache_salt=None
    )
    assert connector._named_prefix(plain) is None


@pytest.mark.parametrize("names", [{"a": object()}, [SimpleNamespace(lora_name="a")]])
def test_the_server_rejects_the_name_of_an_adapter_before_the_engine_sees_it(serving, names):
    state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests=names))
    body = {"model": "a", "prompt": "x", "kv_transfer_params": {"kvcat": "doc"}}
    with pytest.raises(InputError, match="a request with a LoRA adapter cannot name one"):
        serving._with_token_ids(state, "prompt", json.dumps(body).encode())
    without = json.dumps({"model": "a", "prompt": "x"}).encode()
    assert serving._with_token_ids(state, "prompt", without) == without


HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM (make test-vllm)")
def test_the_connector_overrides_all_that_vllm_asks_for_with_its_parameters(serving):
    connector = serving.CompactCacheConnector
    assert not connector.__abstractmethods__
    overridden = set()
    for base in (serving.base.KVConnectorBase_V1, serving.base.SupportsHMA):
        for name, method in vars(base).items():
            mine = getattr(connector, name, None)
            if not inspect.isfunction(method) or mine is method or name.startswith("__"):
                continue
            overridden.add(name)
            if mine is not connector._nothing:  # it accepts anything
                assert positional(mine) == positional(method), name
    assert overridden >= {
        "build_connector_meta", "get_block_ids_with_load_errors", "get_num_new_matched_tokens",
        "get_transfer_results", "register_kv_caches", "request_finished",
        "request_finished_all_groups", "save_kv_layer", "start_load_kv",
        "update_state_after_alloc", "wait_for_layer_load", "wait_for_save",
    }  # fmt: skip


def positional(method):
    """The names of a method's parameters, without those for further keywords."""
    parameters = inspect.signature(method).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
