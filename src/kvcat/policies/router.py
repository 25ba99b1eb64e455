"""The paper's learned policy."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from kvcat.errors import check_in, check_least
from kvcat.policies._base import SparsificationPolicy
from kvcat.types import Float, Tensor

_CHUNK_TOKENS = 64


class Router(SparsificationPolicy):
    """Keep probabilities from the cosine between a token's projection and its summarised state.

    With h~ = LN(h), q = phi(W_Q h~), k = phi(W_K h~), r = W_V h~, phi = ELU + 1:
    a_t = W_O (q_t^T S_t) / (q_t^T z_t + 1e-6) with S_t = sum_{j<=t} k_j r_j^T,
    z_t = sum_{j<=t} k_j, and p_t = (1 - cos(W_P h_t, h_t + alpha a_t)) / 2.

    At the start W_P = -I and alpha = 0, so every p is exactly 1. The cosine has its extremum there:
    the gradient of p by every parameter is zero up to rounding, which Adam's normalisation turns
    into first steps. ``noise`` on W_P leaves that critical point at once. Zero is the paper's
    choice.

    The router computes in the type of its parameters, at least float32, whatever the type of the
    hidden states or of autocast.

    Args:
        hidden_size: width of the hidden states.
        feature_dim: width of q, k and r.
        noise: standard deviation of the Gaussian noise on the entries of W_P, not negative.
        generator: source of the initial weights; None starts one from seed 0. The global random
            state does not change.

    Raises:
        InputError: a size below 1 or negative noise.

    References: KV-CAT, appendix "Router parameterization"; Hwang et al. 2025 (H-Net),
        arXiv:2507.07955.
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "hidden"

    def __init__(
        self,
        hidden_size: int,
        feature_dim: int = 64,
        *,
        noise: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_least(1, hidden_size=hidden_size, feature_dim=feature_dim)
        check_in("[0, inf)", noise=noise)
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(hidden_size, dtype=torch.float32)
        self.q_proj = _projection(hidden_size, feature_dim, generator)
        self.k_proj = _projection(hidden_size, feature_dim, generator)
        self.v_proj = _projection(hidden_size, feature_dim, generator)
        self.o_proj = _projection(feature_dim, hidden_size, generator)
        self.p_proj = _projection(hidden_size, hidden_size, generator)
        self.alpha = nn.Parameter(torch.zeros((), dtype=torch.float32))
        with torch.no_grad():
            identity = torch.eye(hidden_size)
            # W_P = -I and alpha = 0 make every p 1: training starts from the dense model
            self.p_proj.weight.normal_(generator=generator).mul_(noise).sub_(identity)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        generators: Sequence[torch.Generator] | None = None,  # noqa: ARG002 (the protocol's)
    ) -> Float[Tensor, "batch tokens"]:
        """Keep probabilities p, in [0, 1]; p_t depends on positions up to t only."""
        wide = torch.promote_types(self.alpha.dtype, torch.float32)
        # cosines near -1, where training starts, differ by less than 16 bits resolve
        with torch.autocast(hidden.device.type, enabled=False):
            h = hidden.to(wide)
            summary = self._summary(h)
            projected = _apply(self.p_proj, h)
            cosine = _cosine(projected, h + self.alpha.to(wide) * summary)
            return (0.5 - 0.5 * cosine).clamp(0.0, 1.0)

    def _summary(
        self, h: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """a_t: causal linear attention over the normalised states."""
        norm_weight = self.norm.weight.to(h.dtype)
        norm_bias = self.norm.bias.to(h.dtype)
        shape = self.norm.normalized_shape
        normed = functional.layer_norm(h, shape, norm_weight, norm_bias, self.norm.eps)
        # q, k and r in one product: (3 * features, hidden)
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        q, k, r = functional.linear(normed, weights.to(h.dtype)).chunk(3, dim=-1)
        attended = linear_attention(functional.elu(q) + 1, functional.elu(k) + 1, r)
        return _apply(self.o_proj, attended)


def _cosine(
    a: Float[Tensor, "batch tokens hidden"], b: Float[Tensor, "batch tokens hidden"]
) -> Float[Tensor, "batch tokens"]:
    """<a, b> / (|a| |b|); -1 if a or b is zero.

    It is exactly -1 at a = -b, because sqrt(x * x) = x in IEEE arithmetic. A zero vector, such as
    the embedding of a padding token, is kept: training starts from the dense model.
    """
    squares = (a * a).sum(-1) * (b * b).sum(-1)
    tiny = torch.finfo(a.dtype).tiny
    cosine = (a * b).sum(-1) / squares.clamp_min(tiny).sqrt()
    return torch.where(squares < tiny, -1.0, cosine)


def _projection(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear map without bias, uniform in +/- num_inputs ** -0.5 (PyTorch's range)."""
    layer = nn.Linear(num_inputs, num_outputs, bias=False, dtype=torch.float32, device="meta")
    layer = layer.to_empty(device="cpu")
    bound = num_inputs**-0.5
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
    return layer


def _apply(
    layer: nn.Linear, x: Float[Tensor, "batch tokens inputs"]
) -> Float[Tensor, "batch tokens outputs"]:
    return functional.linear(x, layer.weight.to(x.dtype))


def linear_attention(
    queries: Float[Tensor, "batch tokens features"],
    keys: Float[Tensor, "batch tokens features"],
    values: Float[Tensor, "batch tokens channels"],
) -> Float[Tensor, "batch tokens channels"]:
    """Weighted mean of the values so far: q_t^T S_t / (q_t^T z_t + 1e-6).

    S_t = sum_{j<=t} k_j v_j^T and z_t = sum_{j<=t} k_j. Within a chunk the products q_t.k_j are
    made; between chunks only the sums S and z are passed on. Memory grows as
    tokens * chunk + tokens / chunk * features * channels.

    References: KV-CAT, appendix "Router parameterization"; Katharopoulos et al. 2020,
        arXiv:2006.16236.
    """
    num_tokens = queries.shape[1]
    chunk = min(_CHUNK_TOKENS, max(num_tokens, 1))
    q = _in_chunks(queries, chunk)  # (batch, chunks, chunk, features)
    k = _in_chunks(keys, chunk)
    v = _in_chunks(values, chunk)
    v = functional.pad(v, (0, 1), value=1.0)  # a channel of ones makes the normaliser
    sums = (k.mT @ v).cumsum(1)  # (batch, chunks, features, channels + 1)
    sums_before = functional.pad(sums[:, :-1], (0, 0, 0, 0, 1, 0))
    # (batch, chunks, chunk, channels + 1): pairs within the chunk, and sums of the chunks before
    numerator_and_normaliser = (q @ k.mT).tril() @ v + q @ sums_before
    numerator = numerator_and_normaliser[..., :-1]
    normaliser = numerator_and_normaliser[..., -1:]
    return (numerator / (normaliser + 1e-6)).flatten(1, 2)[:, :num_tokens]


def _in_chunks(
    states: Float[Tensor, "batch tokens channels"], chunk: int
) -> Float[Tensor, "batch chunks chunk channels"]:
    """Chunks of tokens, the last one filled up with zeros."""
    padding = -states.shape[1] % chunk
    return functional.pad(states, (0, 0, 0, padding)).unflatten(1, (-1, chunk))


def make(*, target: float, **options: Any) -> Router:  # noqa: ARG001 (the budget loss aims at it)
    """The router of one group."""
    return Router(**options)
