"""Compact caches in engines: vLLM (``kvcat.serving.vllm``), llama.cpp, plain transformers."""
# isort: skip_file

# fmt: off
from kvcat.serving.documents import Document as Document, open_documents as open_documents
from kvcat.serving.fingerprints import CheckpointFingerprints as CheckpointFingerprints
from kvcat.serving.llama_cpp import LlamaCpp as LlamaCpp
from kvcat.serving.prefix import (
    Prefix as Prefix, export_prefix as export_prefix, plain_prefix as plain_prefix,
    read_prefix as read_prefix,
)
from kvcat.serving.requests import (
    chat_ids as chat_ids, prompt_ids as prompt_ids, request_fields as request_fields,
)
from kvcat.serving.widen import widen as widen, write_gguf as write_gguf
# fmt: on
