"""Settings of a GGUF file's tokenizer that transformers ignores."""

from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from kvcat.errors import InputError
from kvcat.models.gguf_file import tokenizer_settings

_SPLITS_OF_TRANSFORMERS = "transformers.integrations.gguf.gguf_tokenizer_mapping"
_AS_GPT2 = "gpt-2"
_SINGLE_DIGITS = "smollm"
# kinds of split whose texts begin with BOS in llama.cpp where a file does not say otherwise
_BEGIN_WITH_BOS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken",
)  # fmt: skip


def follow_gguf_settings(tokenizer: Any, path: Path) -> None:
    """Let a tokenizer split and begin texts as its GGUF file says.

    transformers splits texts as GPT-2 does where it does not know ``tokenizer.ggml.pre``, and 5.19
    ignores ``add_bos_token``. Where a file lacks this, byte-level texts have no BOS; in llama.cpp
    they have one for some kinds of split.

    Raises:
        InputError: a kind of split that neither transformers nor kvcat knows, or a text without
            the space that SentencePiece puts before it.
    """
    settings = tokenizer_settings(path)
    split = settings.get("pre")
    is_byte_level = settings.get("model") == "gpt2"
    if is_byte_level and split == _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    elif is_byte_level and split not in (None, _AS_GPT2, *_known_splits()):
        raise InputError(
            f"{path} splits texts as {split!r} (tokenizer.ggml.pre), which transformers does not "
            "know: use the model's folder"
        )
    if settings.get("model") == "llama" and settings.get("add_space_prefix") is False:
        raise InputError(
            f"{path} puts no space before a text (tokenizer.ggml.add_space_prefix), which "
            "transformers does: use the model's folder"
        )
    begins_with_bos = settings.get("add_bos_token", is_byte_level and split in _BEGIN_WITH_BOS)
    if begins_with_bos and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True


def _known_splits() -> list[str]:
    """The kinds of split that the installed transformers knows."""
    try:
        return [*import_module(_SPLITS_OF_TRANSFORMERS).GGUF_PRE_TOKENIZER_SPLITS]
    except (ImportError, AttributeError):  # another version
        return []
