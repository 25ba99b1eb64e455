"""Tokens per second of the control and of plain continued pretraining in transformers' Trainer.

    python benchmarks/trainer.py [--model kvcat-base] [--steps 12] [--seq-len 1024] [--batch 4]
        [--device cpu]

Both train the same model on the same batches with float32 AdamW and clipping, without validation.
Each is a process of its own; they take turns, and the first steps of each do not count. Needs
accelerate, which comes with kvcat[harness].
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvcat.errors import run_script

WARM = 3


def ours(args: argparse.Namespace) -> float:
    from kvcat.files import read_jsonl
    from kvcat.training.config import TrainConfig
    from kvcat.training.loop import train

    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainConfig.from_dict(
            {
                "model": args.model,
                "output": f"{scratch}/run",
                "policy": "control",
                "seq_len": args.seq_len,
                "batch_size": args.batch,
                "max_steps": args.steps,
                "warmup_steps": 1,
                "validation_every": args.steps,
                "validation_sequences": 1,
                "checkpoint_every": args.steps,
                "device": args.device,
            }
        )
        train(settings, progress=False)
        rates = [
            r["tokens_per_s"]
            for r in read_jsonl(Path(scratch) / "run" / "metrics.jsonl")
            if r["kind"] == "train"
        ]
    return sorted(rates[WARM:])[len(rates[WARM:]) // 2]


def theirs(args: argparse.Namespace) -> float:
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from kvcat.hub import BASE_NAME, local_folder

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            if args.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.start)

    model = AutoModelForCausalLM.from_pretrained(
        local_folder(args.model or BASE_NAME), dtype=torch.float32
    )
    tokens = torch.randint(model.config.vocab_size, (args.steps * args.batch, args.seq_len))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            use_cpu=args.device == "cpu",
            disable_tqdm=True,
        )
        clock = Clock()
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=rows,  # type: ignore[arg-type]
            callbacks=[clock],
        )
        trainer.train()
    seconds = sorted(clock.seconds[WARM:])
    return args.batch * args.seq_len / seconds[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps({"rate": {"ours": ours, "theirs": theirs}[args.one](args)}))
        return
    ratios = []
    for _ in range(args.rounds):
        rates = {}
        for name in ("ours", "theirs"):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rates[name] = json.loads(output.splitlines()[-1])["rate"]
        ratios.append(rates["ours"] / rates["theirs"])
        print(
            f"kvcat's control {rates['ours']:,.0f} tokens/s, transformers' Trainer "
            f"{rates['theirs']:,.0f}"
        )
    print(f"ratio: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    run_script(main)
