"""Which solution of the histogram does training find? Small transformers, with and without KV-CAT.

Networks of the theory's architecture with two blocks learn the running histogram of 3 symbols, the
usual way and with the masked objective, from the same weights on the same data. Then a gradient
search finds the best cache for every number of slots, judged by the worst of all suffixes. The
table compares the trained networks with the two constructions of ``kvcat.theory``.

    python examples/train_histogram.py --seeds 5    # the table of docs/theory.md; minutes per seed
    python examples/train_histogram.py --quick      # seconds; shows only that everything runs
"""

import argparse
import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from scipy import stats
from torch import Tensor

from kvcat.losses import budget_loss
from kvcat.policies import Router, gate
from kvcat.theory import (
    compressible_histogram,
    histogram_policy,
    incompressible_histogram,
    sequences,
)
from kvcat.theory import (
    definitions as d,
)
from kvcat.theory.histogram import multisets
from kvcat.theory.optimum import joint_optimum

SYMBOLS = 3
MATRICES = ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")
FULL = SimpleNamespace(
    length=8,
    width=16,
    key_width=8,
    hidden=32,
    steps=1500,
    batch=64,
    prefix_len=5,
    num_prefixes=9,
    search_steps=200,
)
QUICK = SimpleNamespace(
    length=6,
    width=8,
    key_width=4,
    hidden=16,
    steps=120,
    batch=32,
    prefix_len=3,
    num_prefixes=4,
    search_steps=40,
)


def draw_weights(setting: SimpleNamespace, seed: int, uniform: bool) -> dict[str, Tensor]:
    """Trainable tensors by name.

    All are drawn, then the fixed ones are set to zero, so that variants share all others.

    """
    draw = torch.Generator().manual_seed(seed)
    width = setting.width
    key = setting.key_width
    hidden = setting.hidden

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return scale * torch.randn(rows, columns, generator=draw, dtype=torch.float64)

    weights = {
        "symbols": normal(SYMBOLS, width, 1.0),
        "positions": normal(setting.length, width, 0.5),
    }
    for number, d_out in enumerate((width, SYMBOLS)):
        for name, columns in zip(MATRICES[:4], (key, key, width, width), strict=True):
            weights[f"{number}.{name}"] = normal(width, columns, width**-0.5)
        weights[f"{number}.w_1"] = normal(width, hidden, (2 / width) ** 0.5)
        weights[f"{number}.w_2"] = normal(hidden, d_out, hidden**-0.5)
        weights[f"{number}.b_1"] = torch.zeros(hidden).double()
        weights[f"{number}.b_2"] = torch.zeros(d_out).double()
    fixed = ("0.w_q", "0.w_k", "1.w_q", "1.w_k", "0.w_o") if uniform else ()
    return {name: w.zero_() if name in fixed else w.requires_grad_() for name, w in weights.items()}


def transformer(weights: dict[str, Tensor]) -> d.Transformer:
    """The network on these tensors; gradients reach them through it."""
    blocks = []
    for number in (0, 1):
        w_q, w_k, w_v, w_o, w_1, w_2 = (weights[f"{number}.{name}"] for name in MATRICES)
        ffn = d.FeedForward(w_1, weights[f"{number}.b_1"], w_2, weights[f"{number}.b_2"])
        blocks.append(d.Block((d.AttentionHead(w_q, w_k, w_v),), w_o, ffn))
    return d.Transformer(
        weights["symbols"][:, None] + weights["positions"], tuple(blocks), causal=True
    )


def dense_pass(model: d.Transformer, tokens: Tensor) -> list[Tensor]:
    """The embedding and the outputs of both blocks at every position."""
    states = [model.embed(tokens)]
    for block in model.blocks:
        head = block.heads[0]
        x = states[-1]
        states.append(d.run_block(block, x, [(x @ head.w_k, x @ head.w_v)], causal=True))
    return states


def masked_pass(
    model: d.Transformer, tokens: Tensor, n: int, dense: list[Tensor], routers: dict[int, Router]
):
    """The tokens behind a prefix of n see the slots of it that the routers keep; outputs and
    routers' scores.
    """
    x = model.embed(tokens)[:, n:]
    scores = {}
    keep = x.new_ones(len(x), n)
    for number, block in enumerate(model.blocks):
        head = block.heads[0]
        past = torch.cat([dense[number][:, :n], x], 1)
        if number in routers:
            scores[number] = routers[number](dense[number][:, :n])
            keep = gate(scores[number])
        visible = torch.cat([keep, x.new_ones(x.shape[:2])], 1)[:, None]
        q = x @ head.w_q
        k = past @ head.w_k
        v = past @ head.w_v
        logits = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(n + 1)
        hard = logits.masked_fill(later | (visible == 0), -torch.inf).softmax(-1) @ v
        # the gradient of the mask is taken at the dense attention ("surrogate")
        soft = logits.detach().masked_fill(later, -torch.inf).softmax(-1) * (
            1 + visible - visible.detach()
        )
        soft = soft / soft.sum(-1, keepdim=True) @ v.detach()
        x = block.feed_forward((hard + soft - soft.detach()) @ block.w_o + x)
    return x, scores


def running_histograms(tokens: Tensor) -> Tensor:
    """The histogram of every beginning of every sequence."""
    counts = torch.nn.functional.one_hot(tokens, SYMBOLS).double().cumsum(1)
    return counts / torch.arange(1, tokens.shape[1] + 1)[:, None]


def task_error(model: d.Transformer) -> float:
    """Root mean square of || M(a) - hist(a) || over all sequences of N symbols and their
    beginnings.
    """
    errors = dense_pass(model, tokens := sequences(SYMBOLS, model.num_positions))[
        -1
    ] - running_histograms(tokens)
    return math.sqrt(errors.square().sum(-1).mean())


def train(
    setting: SimpleNamespace, seed: int, num_steps: int, *, uniform: bool, masked: bool
) -> d.Transformer:
    """L = || M(a) - hist(a) ||^2 + || sg M(a) - M_mask(a) ||^2 + 0.1 B; without ``masked`` the
    first term alone.
    """
    weights = draw_weights(setting, seed, uniform)
    draw = torch.Generator().manual_seed(seed)
    starts = () if not masked else (1,) if uniform else (0, 1)
    size = (setting.width, setting.width)
    routers = {start: Router(*size, noise=0.05, generator=draw).double() for start in starts}
    trained = [w for w in weights.values() if w.requires_grad] + [
        p for r in routers.values() for p in r.parameters()
    ]
    optimizer = torch.optim.Adam(trained, lr=1e-2, fused=True)
    data, masks = (torch.Generator().manual_seed(2 * seed + i + 2**20) for i in range(2))
    for step in range(num_steps):
        share = step / num_steps
        optimizer.param_groups[0]["lr"] = (
            1e-2 * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
        )
        model = transformer(weights)
        # symbols' probabilities are uniform on the simplex, so that constant sequences are not rare
        odds = (
            -torch.rand(setting.batch, SYMBOLS, generator=data, dtype=torch.float64)
            .clamp_min(1e-12)
            .log()
        )
        tokens = torch.multinomial(odds, setting.length, replacement=True, generator=data)
        states = dense_pass(model, tokens)
        loss = (states[-1] - running_histograms(tokens)).square().sum(-1).mean()
        if routers:
            n = int(torch.randint(1, setting.length, (), generator=masks))
            outputs, scores = masked_pass(model, tokens, n, states, routers)
            loss = loss + (states[-1][:, n:].detach() - outputs).square().sum(-1).mean()
            for p in scores.values():
                loss = loss + 0.1 / len(scores) * budget_loss((p > 0.5).double(), p, 0.25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return transformer({name: w.detach() for name, w in weights.items()})


def draw_prefixes(setting: SimpleNamespace) -> Tensor:
    """Prefixes of different counts in random orders: the constant ones, and drawn ones."""
    rows = multisets(SYMBOLS, setting.prefix_len)
    draw = torch.Generator().manual_seed(0)
    constant = (rows == rows[:, :1]).all(1)
    others = rows[~constant]
    others = others[
        torch.randperm(len(others), generator=draw)[: setting.num_prefixes - SYMBOLS].sort().values
    ]
    others = others.gather(
        1, torch.rand(others.shape, generator=draw, dtype=torch.float64).argsort(1)
    )
    return torch.cat([rows[constant], others])


def search_caches(model: d.Transformer, prefixes: Tensor, r: int, num_steps: int) -> Tensor:
    """For each prefix the worst error over all suffixes, with the best cache of r slots that the
    search finds.

    Adam on the p-norm of the errors, p rising from 4 to 200. Keys move in coordinates in which
    queries are white. Two starts: runs of slots merged into their means, and these with the
    logarithm of the run's length on the scores.
    """
    suffixes = sequences(SYMBOLS, model.num_positions - (n := prefixes.shape[1]))
    shape = (len(prefixes), len(suffixes), -1)
    states = dense_pass(
        model, torch.cat([prefixes[:, None].expand(shape), suffixes.expand(shape)], -1)
    )
    targets = states[-1][..., n:, :].repeat_interleave(2, 0)
    run_len = (torch.arange(r + 1) * n // r).diff()
    merge = torch.block_diag(
        *[torch.full((1, int(length)), 1 / int(length)).double() for length in run_len]
    )
    starts = []
    scales = []
    for block, x, states_after in zip(
        model.blocks, states, dense_pass(model, prefixes), strict=False
    ):
        head = block.heads[0]
        q = (x[..., n:, :] @ head.w_q).flatten(0, 2) / head.w_k.shape[1] ** 0.5
        energy, axes = torch.linalg.eigh(q.mT @ q / len(q))
        attends = float(energy[-1]) > 1e-24
        whiten = (
            energy.clamp_min(float(energy[-1]) * 1e-6).rsqrt() * axes
            if attends
            else torch.zeros_like(axes)
        )
        keys, values = (
            (merge @ (states_after @ w))[:, None].repeat(1, 2, 1, 1) for w in (head.w_k, head.w_v)
        )
        if float(q.mean(0).square().sum()) > 1e-24:
            keys[:, 1] += run_len.double().log()[:, None] * q.mean(0) / q.mean(0).square().sum()
        starts += [keys.flatten(0, 1), values.flatten(0, 1)]
        scales += [
            whiten.mT,
            (states_after @ head.w_v).square().mean().sqrt() * torch.eye(values.shape[-1]).double(),
        ]
    moves = [torch.zeros_like(start, requires_grad=True) for start in starts]
    optimizer = torch.optim.Adam(moves, lr=0.1, fused=True)
    best = torch.full((len(targets),), torch.inf).double()
    for step in range(num_steps + 1):
        share = step / num_steps
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - share) ** 1.5
        cached = [
            start + move @ scale for start, move, scale in zip(starts, moves, scales, strict=True)
        ]
        x = model.embed(suffixes, start=n).expand(len(targets), -1, -1, -1)
        for block, pair in zip(
            model.blocks, zip(cached[::2], cached[1::2], strict=True), strict=True
        ):
            keys, values = (slots[:, None].expand(-1, len(suffixes), -1, -1) for slots in pair)
            states_after = (
                torch.cat([keys, x @ block.heads[0].w_k], -2),
                torch.cat([values, x @ block.heads[0].w_v], -2),
            )
            x = d.run_block(block, x, [states_after], causal=True)
        errors = (x - targets).square().sum(-1).add(1e-30).sqrt().flatten(1)
        best = torch.minimum(best, errors.detach().amax(1))
        optimizer.zero_grad()
        ((4.0 * 50.0**share * errors.log()).logsumexp(1) / (4.0 * 50.0**share)).sum().backward()
        optimizer.step()
    return best.view(-1, 2).amin(1)


def policy_errors(
    model: d.Transformer, prefixes: Tensor, policy: d.Policy, num_slots: int
) -> Tensor:
    """The worst error of each prefix with the caches of a policy."""
    worst = [
        d.compressibility(model, policy, lambda _: num_slots, prefixes=[row])
        for row in prefixes.tolist()
    ]
    return torch.tensor([case.error for case in worst])


def measure(model: d.Transformer, setting: SimpleNamespace) -> list[Tensor]:
    """Errors of the prefixes for r = 1, ..., n slots; n slots are the prefix's own cache."""
    prefixes = draw_prefixes(setting)
    n = setting.prefix_len
    optimal = [search_caches(model, prefixes, r, setting.search_steps) for r in range(1, n)]
    return [*optimal, policy_errors(model, prefixes, (d.keep_all, d.keep_all), n)]


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % t interval over seeds; not a number for one seed."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else math.nan
    return (mean := sum(values) / len(values)), mean - half, mean + half


def show(
    name: str, runs: list[list[Tensor]], usual: list[list[Tensor]] | None = None, note: str = ""
) -> None:
    """Rows of the table for one network: a line for each number of slots, the first with a note."""
    for r, errors in enumerate(zip(*runs, strict=True), 1):
        means = [float(row.mean()) for row in errors]
        mean, low, high = interval(means)
        ends = f"{mean:.4f}" + (f" [{max(low, 0.0):.4f}, {high:.4f}]" if len(runs) > 1 else "")
        line = (
            f"{name:38s} {r:5d}  {ends:24s} "
            f"{sum(float(row.max()) for row in errors) / len(runs):12.4f}"
        )
        if usual is not None and mean > 1e-11:
            logs = [
                math.log(own_mean / float(other[r - 1].mean()))
                for own_mean, other in zip(means, usual, strict=True)
            ]
            ratio, low, high = (math.exp(value) for value in interval(logs))
            line += f"  {ratio:.3f}" + (f" [{low:.3f}, {high:.3f}]" if len(runs) > 1 else "")
        print(line + (note if r == 1 else ""), flush=True)


def main() -> None:
    """Train, measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small networks, few steps")
    options = parser.parse_args()
    setting = QUICK if options.quick else FULL
    short = (
        setting.steps * 4 // 15
    )  # a control: its task error can be that of the masked objective, which costs some
    print(
        f"{'network':38s} slots  mean over prefixes       worst prefix  against the usual training"
    )
    for attention in ("uniform", "trained"):
        usual = None
        for kind, steps in (
            ("usual", setting.steps),
            ("router", setting.steps),
            (f"usual, {short} steps", short),
        ):
            how = {"uniform": attention == "uniform", "masked": kind == "router"}
            models = [train(setting, seed, steps, **how) for seed in range(options.seeds)]
            name = f"{kind}, {attention} attention"
            rms = sum(map(task_error, models)) / len(models)
            runs = [measure(model, setting) for model in models]
            show(name, runs, usual if kind == "router" else None, f"  task error (rms) {rms:.4f}")
            usual = usual or runs
    prefixes = draw_prefixes(setting)
    n = setting.prefix_len
    m = SYMBOLS
    hard = replace(incompressible_histogram(m, setting.length, num_blocks=4), causal=True)
    easy = replace(compressible_histogram(m, setting.length), causal=True)
    counts = [torch.bincount(row, minlength=m) for row in prefixes]
    budgets = range(1, n + 1)
    optima = [
        torch.tensor([joint_optimum(row, setting.length - n, r).error for row in counts])
        for r in budgets
    ]
    show("incompressible construction, optimum", [optima])
    show(
        "compressible construction, its policy",
        [[policy_errors(easy, prefixes, histogram_policy(m), 1)]],
    )
    show("incompressible construction, found", [measure(hard, setting)])
    show("compressible construction, found", [measure(easy, setting)])


if __name__ == "__main__":
    main()
