"""What runs/gpu.sh needs next to kvcat's commands.

    python runs/gpu.py shape FOLDER [--tiny]    # a model of Qwen2.5-0.5B's shape, random weights
    python runs/gpu.py text FILE --tokens N --model MODEL    # the standard library's sources
    python runs/gpu.py speed RUN...             # tokens a second and model FLOP utilisation of runs

The speed is the median over the second half of a run's steps, as its metrics.jsonl records them.
"""

import argparse
import statistics
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from kvcat.errors import run_script
from kvcat.files import read_json, read_jsonl
from kvcat.hub import local_folder
from kvcat.models import load, load_tokenizer, save
from kvcat.training.config import TrainConfig
from kvcat.training.plan import flops_per_token

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from training import PEAKS, SHAPES

QWEN = SHAPES["qwen2.5-0.5b"]
TINY = QWEN | {"hidden_size": 28, "intermediate_size": 64}


def shape(folder: Path, *, tiny: bool) -> None:
    """Save the model, with kvcat-base's tokenizer: its ids are the first of the vocabulary."""
    torch.manual_seed(0)
    sizes = TINY if tiny else QWEN
    made = Qwen2Config(**sizes, max_position_embeddings=32_768, tie_word_embeddings=True)
    tokenizer = AutoTokenizer.from_pretrained(local_folder("kvcat-base"))
    save(Qwen2ForCausalLM(made).to(torch.bfloat16), tokenizer, folder)


def text(file: Path, model: str, num_tokens: int) -> None:
    """Write a text of so many tokens: files of Python's standard library, one after the other."""
    tokenizer = load_tokenizer(model)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ids: list[int] = []
    while len(ids) < num_tokens:
        source = sources.pop(0).read_text(encoding="utf-8", errors="replace")
        ids += tokenizer.encode(source, add_special_tokens=False, verbose=False)
    file.write_text(tokenizer.decode(ids[:num_tokens]), encoding="utf-8")


def speed(runs: list[Path]) -> None:
    """Print a row for each run."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    peak = next((peak for gpu, peak in PEAKS.items() if gpu in name), None)
    print(f"{name}, torch {torch.__version__}\n")
    print("| run | tokens/s | share of the peak, % |\n|---|---|---|")
    for run in runs:
        config = TrainConfig.from_dict(read_json(run / "config.json"))
        lines = read_jsonl(run / "metrics.jsonl")
        rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
        rate = statistics.median(rates[len(rates) // 2 :])
        model, _ = load(config.model, tokenizer=False)
        share = f"{100 * rate * flops_per_token(model, config) / peak:.1f}" if peak else "-"
        print(f"| {run.name} | {rate:,.0f} | {share} |")


def main() -> None:
    """Make the model, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["shape", "text", "speed"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a model for a trial on a processor")
    parser.add_argument("--tokens", type=int, default=8000, help="of the text")
    parser.add_argument("--model", default="kvcat-base", help="whose tokens they are")
    options = parser.parse_args()
    if options.action == "shape":
        shape(options.paths[0], tiny=options.tiny)
    elif options.action == "text":
        text(options.paths[0], options.model, options.tokens)
    else:
        speed(options.paths)


if __name__ == "__main__":
    run_script(main)
