"""Tokenizers of the kinds that models have, small (a helper of the tests)."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tiny import byte_tokenizer, sentences

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TEXTS = [text.strip() for text in sentences(200)] + list(map(chr, range(32, 127))) + ["\n"]


def surround(tokenizer, *, before=(), after=()):
    """The tokenizer with special tokens that it puts before and after each text."""
    names = [*before, *after]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
    )
    return tokenizer


def _finished(backend, **options):
    special = [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
        **options,
    )


def byte_level(*, before=(), after=()):
    """A byte-level BPE with special tokens, as of GPT-2, Llama 3 and Qwen."""
    tokenizer = byte_tokenizer(chat=False)
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": ["<|im_end|>", "</s>"]}
    )
    return surround(tokenizer, before=before, after=after)


def taking_blanks():
    """A byte-level BPE whose control tokens take the blanks around them."""
    tokenizer = byte_tokenizer(chat=False)
    for name, role in (("<s>", "bos_token"), ("</s>", "eos_token"), ("<|im_end|>", "sep_token")):
        token = AddedToken(name, special=True, normalized=False, lstrip=True, rstrip=True)
        tokenizer.add_special_tokens({role: token})
    return tokenizer


def metaspace(scheme="first", *, before=("<s>",), after=()):
    """A BPE with a space before the first word, as SentencePiece has it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return surround(_finished(backend), before=before, after=after)


def legacy(*, before=("<s>",), after=()):
    """A BPE whose normalizer puts a space before each stretch of text, as of Llama 2."""
    backend = Tokenizer.from_str(metaspace().backend_tokenizer.to_str())
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return surround(_finished(backend), before=before, after=after)


def unigram(*, before=("<s>",), after=()):
    """A unigram model with a space before the first word, whose vocabulary holds control tokens."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return surround(_finished(backend), before=before, after=after)


def byte_fallback():
    """A BPE that spells characters it does not know in bytes, as of Llama 2 and Mistral."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", "a", "b", "\u2581a", "\u2581b"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("\u2581", "a"), ("\u2581", "b")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finished(backend)


KINDS = {
    "byte-level": byte_level,
    "byte-level with BOS": lambda: byte_level(before=["<s>"]),
    "byte-level with EOS": lambda: byte_level(after=["</s>"]),
    "byte-level with both": lambda: byte_level(before=["<s>"], after=["</s>"]),
    "byte-level taking blanks": taking_blanks,
    "two tokens before": lambda: byte_level(before=["<|im_end|>", "<s>"]),
    "metaspace first": metaspace,
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "metaspace with EOS": lambda: metaspace(after=["</s>"]),
    "legacy": legacy,
    "legacy with EOS": lambda: legacy(after=["</s>"]),
    "unigram": unigram,
}
