"""The pretraining of the small base model that comes with the package."""

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvcat.data import Document, hash_order, open_documents, split_of
from kvcat.models import save
from kvcat.training.config import TrainConfig
from kvcat.training.loop import train

VOCAB_SIZE = 1024
CONTEXT = 1024
EOS = "<|endoftext|>"
TOKENIZER_DOCUMENTS = 800


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 1,024 tokens, learned from the documents.

    Every byte has a token, so any text can be encoded.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        (document.text for document in documents),
        vocab_size=VOCAB_SIZE,
        min_frequency=0,
        special_tokens=[EOS],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()),
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def write_untrained(folder: Path, seed: int) -> None:
    """Write an untrained model and its tokenizer as a Hugging Face folder.

    The model is a Qwen2 with grouped-query attention, 6 layers, width 96 and about 0.7 million
    parameters.

    Args:
        folder: folder to write.
        seed: seed of the weights and of the documents for the tokenizer.
    """
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    documents = open_documents("installed")
    training = [document for document in documents if split_of(document.id) == "train"]
    tokenizer = train_tokenizer(hash_order(training, seed)[:TOKENIZER_DOCUMENTS])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    save(model, tokenizer, folder)


def pretrain(output: Path, *, device: str = "cpu") -> Path:
    """The Hugging Face folder of the base, pretrained from random weights; continues a run.

    It is trained with the plain next-token loss on 23 million tokens of installed Python sources.
    """
    config = TrainConfig(
        model=str(output / "untrained"),
        output=str(output / "run"),
        policy="control",
        seq_len=CONTEXT,
        batch_size=4,
        max_steps=5600,
        warmup_steps=300,
        peak_lr=5e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        dtype="bfloat16",
        export_dtype="bfloat16",
        device=device,
        log_every=10,
        validation_every=250,
        validation_sequences=32,
        checkpoint_every=250,
    )
    if not (output / "untrained").exists():
        write_untrained(output / "untrained", seed=config.seed)
    return train(config).export
