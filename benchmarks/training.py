"""Time and memory of a training step with KV-CAT, relative to one of the control.

    python benchmarks/training.py [--shape kvcat-base|smollm2-135m|small|...] [--seq-len 1024]
        [--batch 4] [--threads 2] [--compile]

Steps of all variants take turns, and ratios compare neighbours in time; the median is shown. The
control's step is forward, loss and backward of B sequences; KV-CAT's of B dense and B masked ones.
The model is prepared as by `kvcat train`: float32 master weights, with `--dtype bfloat16` sharded
by FSDP2 and used in bfloat16, with `--compile` layers and loss compiled.
KV-CAT needs at least 2.0 times the control's time. Peak memory compares B sequences of KV-CAT with
2 B of the control, each in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvcat.errors import run_script
from kvcat.models import load
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World, distribute, join_world
from kvcat.training.log import peak_memory
from kvcat.training.objective import Objective
from kvcat.training.plan import flops_per_token

# dense peak in bfloat16 by GPU, operations per second, from the vendor's data sheets
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
SHAPES = {
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
VARIANTS = {
    "control": {"policy": "control"},
    "KV-CAT": {},
    "no gradient of the mask": {},
    "random masks, no routers": {"policy": "random"},
    "masked pass on the second half": {"prefix_range": (0.5, 0.5)},
    "masked pass on the last quarter": {"prefix_range": (0.75, 0.75)},
}


def config(**options: object) -> TrainConfig:
    return TrainConfig.from_dict({"model": "kvcat-base", "output": "unused", **options})


def make_model(shape: str, device: str) -> torch.nn.Module:
    if shape not in SHAPES:
        return load(shape, dtype="float32", device=device, tokenizer=False)[0]
    torch.manual_seed(0)
    made = Qwen2Config(**SHAPES[shape], max_position_embeddings=32_768, tie_word_embeddings=True)
    return Qwen2ForCausalLM(made).to(device).eval()


def stepper(
    args: argparse.Namespace, world: World, sequences: int, name: str = "", **options: object
) -> tuple[Objective, Callable[[], None]]:
    settings = config(
        seq_len=args.seq_len,
        batch_size=sequences,
        dtype=args.dtype,
        compile=args.compile,
        **options,
    )
    model = make_model(args.shape, args.device)
    objective = Objective(model, settings).to(args.device)
    distribute(objective, world)
    tokens = torch.randint(model.config.vocab_size, (sequences, args.seq_len), device=args.device)
    generators = [torch.Generator().manual_seed(i) for i in range(sequences)]

    def step() -> None:
        total, _ = objective(tokens, generators, 0)
        total.backward()
        objective.zero_grad(set_to_none=True)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()

    if name == "no gradient of the mask" and objective.masked_pass is not None:
        for policy in objective.masked_pass.policies.values():
            policy.register_forward_hook(lambda _policy, _given, scores: scores.detach())
    if objective.masked_pass is not None and settings.policy == "router":
        with torch.no_grad():  # routers that drop about half, as in training
            for policy in objective.masked_pass.policies.values():
                policy.p_proj.weight.normal_()  # type: ignore[operator,union-attr]
    return objective, step


def times(args: argparse.Namespace, world: World) -> None:
    made = {
        name: stepper(args, world, args.batch, name, **options)
        for name, options in VARIANTS.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(args.repeats + 1):
        for name, (_, step) in made.items():
            start = time.perf_counter()
            step()
            if turn:
                taken[name].append(time.perf_counter() - start)
    print(
        f"\n{args.shape}, {args.batch} x {args.seq_len} tokens, {args.dtype}, {args.device}, "
        f"{'compiled layers, ' if args.compile else ''}torch {torch.__version__}"
    )
    print("\n| step | seconds (median) | over the control's | tokens/s |\n|---|---|---|---|")
    for name, seconds in taken.items():
        ratios = [a / b for a, b in zip(seconds, taken["control"], strict=True)]
        rate = args.batch * args.seq_len / statistics.median(seconds)
        print(
            f"| {name} | {statistics.median(seconds):.3f} | {statistics.median(ratios):.2f} | "
            f"{rate:,.0f} |"
        )
    pairs = zip(taken["KV-CAT"], taken["no gradient of the mask"], taken["control"], strict=True)
    print(
        f"\ngradient of the mask: {statistics.median((a - b) / c for a, b, c in pairs):+.2f} "
        "control steps"
    )
    pairs = zip(
        taken["no gradient of the mask"],
        taken["random masks, no routers"],
        taken["control"],
        strict=True,
    )
    print(f"routers: {statistics.median((a - b) / c for a, b, c in pairs):+.2f} control steps")
    device_name = torch.cuda.get_device_name() if args.device.startswith("cuda") else ""
    peak = next((peak for name, peak in PEAKS.items() if name in device_name), None)
    if peak and args.dtype == "bfloat16":
        for name in ("control", "KV-CAT"):
            objective, _ = made[name]
            rate = args.batch * args.seq_len / statistics.median(taken[name])
            used = rate * flops_per_token(objective.model, objective.config) / peak
            print(f"model FLOP utilisation of {name}: {100 * used:.1f} %")


def memory(args: argparse.Namespace) -> None:
    growth = {}
    for name, options, sequences in (
        ("KV-CAT", {}, args.batch),
        ("control", {"policy": "control"}, 2 * args.batch),
    ):
        request = json.dumps({**vars(args), "options": options, "sequences": sequences})
        command = [sys.executable, str(Path(__file__)), "--one", request]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        growth[name] = json.loads(output)
    ratio = growth["KV-CAT"]["grown"] / growth["control"]["grown"]
    print(
        f"\npeak memory over the model: {growth['KV-CAT']['grown']:.2f} GiB for {args.batch} "
        "sequences of KV-CAT, "
        f"{growth['control']['grown']:.2f} GiB for {2 * args.batch} of the control: ratio "
        f"{ratio:.2f}"
    )


def one(request: dict[str, object]) -> None:
    args = argparse.Namespace(**request)
    torch.set_num_threads(args.threads)
    with join_world(args.device, group=args.dtype != "float32") as world:
        _, step = stepper(args, world, args.sequences, **args.options)
        before = held(args.device)
        for _ in range(2):
            step()
    print(json.dumps({"grown": peak_memory(torch.device(args.device)) - before}))


def held(device: str) -> float:
    """Memory in use by this process, GiB."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated() / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def options(doc: str | None, *, shape: str, repeats: int) -> argparse.ArgumentParser:
    """The options of every benchmark of a training step."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default=shape, help=f"{', '.join(SHAPES)}, or any model by its name or folder"
    )
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = options(__doc__, shape="kvcat-base", repeats=7)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    if args.one:
        one(json.loads(args.one))
        return
    torch.set_num_threads(args.threads)
    with join_world(args.device, group=args.dtype != "float32") as world:
        times(args, world)
    memory(args)


if __name__ == "__main__":
    run_script(main)
