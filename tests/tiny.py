"""A tiny model with its tokenizer, and texts for it (a helper of the tests)."""

import inspect
import random
from unittest import mock

import jaxtyping
import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from kvcat.cache import CompactLayer, HeadSlots
from kvcat.errors import InputError

# of the installed transformers, major and minor
TRANSFORMERS = tuple(int(number) for number in transformers.__version__.split(".")[:2])
WORDS = [
    "the", "a", "cat", "dog", "tree", "river", "stone", "house", "sees", "finds", "likes", "keeps",
    "small", "old", "red", "and", "then", "it", "was",
]  # fmt: skip
CHAT = (
    "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def without_type_checks():
    """A block, or a decorated function, in which annotations are not checked."""
    return mock.patch.object(jaxtyping.config, "jaxtyping_disable", True)


def refusal(call, *arguments, **options):
    """The message of the ``InputError`` that a call raises, which is one line.

    Annotations are not checked in the call: what they rule out is what a user may give by mistake.
    """
    with without_type_checks(), pytest.raises(InputError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rejections(*rows):
    """A test of each row: a part of the message, and a call whose parameters are fixtures."""
    return pytest.mark.parametrize(
        ("message", "call"), rows, ids=[message[:70] for message, _ in rows]
    )


def refusal_with(request, call):
    """The message of the ``InputError`` that a call with its fixtures raises."""
    parameters = inspect.signature(call).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    return refusal(call, **{name: request.getfixturevalue(name) for name in names})


def sentences(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) + ".\n" for _ in range(count)]


def byte_tokenizer(vocab_size=300, *, chat=True):
    """A byte-level BPE: every text encodes, and decodes to itself."""
    made = ByteLevelBPETokenizer()
    options = {"min_frequency": 0, "special_tokens": ["<eos>"], "show_progress": False}
    made.train_from_iterator(sentences(200), vocab_size=vocab_size, **options)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(made.to_str()),
        eos_token="<eos>",
        pad_token="<eos>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT if chat else None,
    )


def stock_model(kind, **options):
    """transformers' own causal LM of a kind ("llama", "gpt_neox", ...) with random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def loud_model(kind="llama", dtype=torch.float32, std=0.3, **options):
    """A small one in evaluation mode with weights so large that attention is far from uniform."""
    sizes = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = stock_model(kind, **{**sizes, **options})
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=std)
    return model.to(dtype).eval()


def write_tiny_model(folder, *, seed=0, chat=True, **options):
    """A Qwen2 of two layers and width 32 with random weights, as an ordinary Hugging Face
    folder."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(chat=chat)
    base = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
    model = stock_model("qwen2", **{**base, **options})
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(folder, *, documents=40, length=12):
    """A folder of short text files, ``00.txt`` and so on."""
    folder.mkdir(parents=True)
    for number in range(documents):
        (folder / f"{number:02d}.txt").write_text("".join(sentences(length, seed=number)))
    return folder


def layer_of(keys, values, log_bias=None, positions=None):
    """A layer from nested lists of tensors, per example and KV head."""
    states = [keys, values, log_bias, positions]
    heads = []
    for example, row in enumerate(keys):
        pick = [[None] * len(row) if each is None else each[example] for each in states]
        heads.append([HeadSlots(*of_head) for of_head in zip(*pick, strict=True)])
    return CompactLayer.of_heads(heads)
