"""The command ``kvcat budgets``: how many slots each head of a model gets, measured once."""

import random
import sys

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.options import check_output


def budgets(
    model: opt.Model,
    /,
    corpus: str,
    output: opt.Output,
    documents: opt.Count = 50,
    tokens: opt.Count = 1024,
    overwrite: opt.Overwrite = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
    text_column: opt.TextColumn = "text",
    id_column: opt.IdColumn = "id",
) -> None:
    """Measure on some documents how many slots each head needs; compression then saves that time.

    Example: kvcat budgets smollm2-135m --corpus articles.parquet -o budgets.json

    Then: kvcat compress smollm2-135m --text report.txt -o report.safetensors --method
    attention-matching,budgets=budgets.json

    Args:
        corpus: A folder of text files, a .jsonl or .parquet file, or hub:NAME; texts such as those
            to compress.
        output: JSON file to write.
        documents: Most documents to use, the first that are long enough, of files in random order.
        tokens: Length of the excerpt of every document.
    """
    early.check_device(device)
    early.check_model(model)

    from kvcat.corpus import corpus_files, read_corpus

    files = list(corpus_files(corpus, text_column=text_column, id_column=id_column))
    check_output(output, overwrite=overwrite, sources=[model, *(file.url for file in files)])
    random.Random(seed).shuffle(files)

    from kvcat.compress.calibration import calibrate_on, excerpts
    from kvcat.models import check_length, load, load_tokenizer, read_config

    check_length("--tokens", tokens, read_config(model))
    sample = excerpts(
        load_tokenizer(model),
        (document.text for document in read_corpus(files)),
        num_documents=documents,
        num_tokens=tokens,
        seed=seed,
    )
    if len(sample) < documents:
        print(
            f"documents with at least {tokens} tokens: {len(sample)} of the {documents} wanted "
            "(--tokens for shorter excerpts)",
            file=sys.stderr,
        )
    loaded, _ = load(model, dtype=dtype, device=device, tokenizer=False)
    calibrated = calibrate_on(loaded, sample)
    calibrated.save(output)
    measured = "1 document" if len(sample) == 1 else f"{len(sample)} documents"
    print(f"{output}: budgets of {measured} of {tokens} tokens")
