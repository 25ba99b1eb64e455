"""Transformers of the theory's architecture, trained on the histogram task with and without the masked objective."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvcat.errors import InputError
from kvcat.losses import budget_loss
from kvcat.policies import SparsificationPolicy, build_policies, check_group_starts
from kvcat.recipes.histogram_network import NUM_BLOCKS, HistogramNetwork, dense_pass, masked_pass
from kvcat.theory.definitions import Transformer, sequences
from kvcat.types import Float, Int, Tensor

METHODS = ("usual", "router", "random")


@dataclass(frozen=True)
class HistogramConfig:
    """A network, its objective and its training.

    Args:
        method: "usual" trains the dense pass alone; "router" and "random" add the masked pass of that policy.
        num_symbols: m, at least 2.
        longest: N, tokens of every training sequence, at least 3.
        width: of the embedding and between the blocks.
        key_width: of queries and keys.
        hidden_width: of the feed-forward maps.
        mixing: block 1 attends; False as in the paper's constructions.
        uniform: uniform attention (W_Q = W_K = 0), as in the paper's constructions; False trains it.
        positions: train positional embeddings; False leaves them out.
        masking: what the masked pass hides: slots of a prefix of random length from the tokens behind it ("prefix"),
            or slots anywhere from all later tokens ("sequence", the paper's).
        target_keep: rho, kept fraction aimed at, in (0, 1).
        mask_weight: of the distance between masked and dense outputs.
        budget_weight: of the budget loss; "random" keeps an exact count and ignores it.
        group_starts: blocks, from 0, at which a policy decides anew.
        num_steps: optimizer steps.
        batch_size: sequences a step.
        peak_lr: Adam's learning rate, cosine to zero.
        seed: of weights, data and masks; methods with the same seed start from the same weights and see the same data.
    """

    method: str = "usual"
    num_symbols: int = 3
    longest: int = 8
    width: int = 16
    key_width: int = 8
    hidden_width: int = 32
    mixing: bool = True
    uniform: bool = False
    positions: bool = True
    masking: str = "prefix"
    target_keep: float = 0.25
    mask_weight: float = 1.0
    budget_weight: float = 0.1
    group_starts: tuple[int, ...] = (0, 1)
    num_steps: int = 1500
    batch_size: int = 64
    peak_lr: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.masking not in ("prefix", "sequence"):
            raise InputError(f"masking must be prefix or sequence, got {self.masking!r}")
        for name, least in (("num_symbols", 2), ("longest", 3), ("num_steps", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.target_keep < 1:
            raise InputError(f"target_keep must lie in (0, 1), got {self.target_keep}")
        check_group_starts(self.group_starts, NUM_BLOCKS)


@dataclass(frozen=True, eq=False)
class TrainedHistogram:
    """A trained network and how well it does its task.

    Args:
        config: that it was trained with.
        model: the network, without gradient.
        parameters: its tensors by name, as ``make_network`` of the configuration loads them.
        rms_error: root mean square of || M(a) - hist(a) || over all sequences of N symbols and their beginnings.
        max_error: its largest value, over all sequences of 1 to N symbols.
        masked_rms: root mean square distance of masked and dense outputs over the last tenth of the training; 0
            without a masked pass.
        kept: mean kept fraction of each group over the same steps; empty without a masked pass.
    """

    config: HistogramConfig
    model: Transformer
    parameters: dict[str, Tensor]
    rms_error: float
    max_error: float
    masked_rms: float
    kept: tuple[float, ...]


def running_histograms(tokens: Int[Tensor, "batch tokens"], num_symbols: int) -> Float[Tensor, "batch tokens symbols"]:
    """The histogram of every beginning of every sequence: symbols' shares among the first 1, 2, ... tokens."""
    counts = functional.one_hot(tokens, num_symbols).to(torch.float64).cumsum(1)
    return counts / torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64)[:, None]


def draw_sequences(
    num_sequences: int, length: int, num_symbols: int, generator: torch.Generator
) -> Int[Tensor, "sequences length"]:
    """Sequences whose count vectors are all equally likely, unlike those of independent uniform symbols.

    Symbols are independent given their probabilities, which are uniform on the simplex (Dirichlet(1, ..., 1)):
    constant prefixes, the worst ones for a compressed cache, are seen as often as balanced ones.
    """
    uniform = torch.rand(num_sequences, num_symbols, generator=generator, dtype=torch.float64)
    return torch.multinomial(-uniform.clamp_min(1e-12).log(), length, replacement=True, generator=generator)


def task_errors(model: Transformer) -> tuple[float, float]:
    """Root mean square and maximum of || M(a) - hist(a) ||, exhaustive: all m^N sequences and all their beginnings."""
    tokens = sequences(model.num_symbols, model.num_positions)
    with torch.no_grad():
        outputs = dense_pass(model, tokens)[-1]
    squares = (outputs - running_histograms(tokens, model.num_symbols)).square().sum(-1)
    return math.sqrt(float(squares.mean())), math.sqrt(float(squares.max()))


def make_network(config: HistogramConfig) -> HistogramNetwork:
    """The untrained network of a configuration; it depends on the seed and the shape, not on the method."""
    return HistogramNetwork(
        config.num_symbols,
        config.longest,
        width=config.width,
        key_width=config.key_width,
        hidden_width=config.hidden_width,
        mixing=config.mixing,
        uniform=config.uniform,
        positions=config.positions,
        generator=torch.Generator().manual_seed(config.seed),
    )


def train_histogram(config: HistogramConfig) -> TrainedHistogram:
    """Train on L = || M(a) - hist(a) ||^2 + lambda_mask || sg M(a) - M_mask(a) ||^2 + lambda_budget B, per position.

    The squared errors stand where the paper has cross entropy and KL. "usual" has the first term alone.

    Args:
        config: all of it; the result depends on nothing else.

    References: KV-CAT, equation "training_objective"; motivating example "histogram computation".
    """
    network = make_network(config)
    policies = _make_policies(config)
    trained = [p for p in network.parameters() if p.requires_grad]
    trained += [p for policy in policies.values() for p in policy.parameters()]
    optimizer = torch.optim.Adam(trained, lr=config.peak_lr, fused=True)
    data, masks = (torch.Generator().manual_seed(2 * config.seed + i + 2**20) for i in range(2))
    last: list[tuple[float, ...]] = []
    for step in range(config.num_steps):
        share = step / config.num_steps
        for group in optimizer.param_groups:
            group["lr"] = config.peak_lr * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
        loss, told = _objective(config, network, policies, data, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if policies and step >= int(0.9 * config.num_steps):
            last.append(told)
    network.requires_grad_(False)
    model = network.transformer()
    means = [sum(column) / len(last) for column in zip(*last, strict=True)]
    rms_error, max_error = task_errors(model)
    masked_rms = math.sqrt(means[0]) if means else 0.0
    parameters = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    return TrainedHistogram(config, model, parameters, rms_error, max_error, masked_rms, tuple(means[1:]))


def _make_policies(config: HistogramConfig) -> dict[int, SparsificationPolicy]:
    if config.method == "usual":
        return {}
    policies = build_policies(
        config.method,
        num_layers=NUM_BLOCKS,
        hidden_size=config.width,
        group_starts=config.group_starts,
        target=config.target_keep,
        feature_dim=config.width,
        noise=0.05,
        seed=config.seed,
    )
    return {start: policy.double() for start, policy in policies.items()}


def _objective(
    config: HistogramConfig,
    network: HistogramNetwork,
    policies: dict[int, SparsificationPolicy],
    data: torch.Generator,
    masks: torch.Generator,
) -> tuple[Tensor, tuple[float, ...]]:
    """The loss of a fresh batch, and the masked pass' mean squared distance and kept fractions."""
    model = network.transformer()
    tokens = draw_sequences(config.batch_size, config.longest, config.num_symbols, data)
    states = dense_pass(model, tokens)
    loss = (states[-1] - running_histograms(tokens, config.num_symbols)).square().sum(-1).mean()
    if not policies:
        return loss, ()
    prefix_len = None
    if config.masking == "prefix":
        prefix_len = int(torch.randint(1, config.longest, (), generator=masks))
    learned = [start for start, policy in policies.items() if policy.learned]
    out = masked_pass(model, tokens, policies, masks, dense=states, prefix_len=prefix_len)
    distance = (states[-1][:, prefix_len or 0 :].detach() - out.values).square().sum(-1).mean()
    loss = loss + config.mask_weight * distance
    for start in learned:
        keep = (out.scores[start] > 0.5).double()
        budget = budget_loss(keep, out.scores[start], config.target_keep)
        loss = loss + config.budget_weight / len(learned) * budget
    kept = [float(mask.detach().mean()) for mask in out.keep.values()]
    return loss, (float(distance.detach()), *kept)
