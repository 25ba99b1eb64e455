"""The names that ``kvcat.serving.vllm`` takes from vLLM, where vLLM is not installed (a helper of
the tests)."""

import importlib.util
import sys
import warnings
from types import ModuleType, SimpleNamespace


class Connector:
    """vLLM's base class of connectors."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.metadata = None

    def _get_connector_metadata(self):
        return self.metadata


class SupportsHMA:
    """vLLM's mark of connectors for several groups of layers."""


MODULES = {
    "vllm.distributed.kv_transfer.kv_connector.v1": {
        "base": SimpleNamespace(
            KVConnectorMetadata=object,
            KVConnectorBase_V1=Connector,
            KVConnectorRole=object,
            KVConnectorTransferResults=SimpleNamespace,
            SupportsHMA=SupportsHMA,
        )
    },
    "vllm.logger": {"init_logger": lambda _: SimpleNamespace(error=lambda *_: None)},
    "vllm.model_executor.models.utils": {
        "extract_layer_index": lambda name: int(name.split(".")[2])
    },
    "vllm.tokenizers": {"get_tokenizer": None},
}


def import_serving(monkeypatch):
    """``kvcat.serving.vllm``, with these names if vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        for path, names in MODULES.items():
            words = path.split(".")
            for count in range(1, len(words) + 1):
                name = ".".join(words[:count])
                if name not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[path]).update(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM imports what torch has deprecated
        return importlib.import_module("kvcat.serving.vllm")
