"""The paper's learned policy."""

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from kvcat.errors import InputError
from kvcat.policies._base import Randomness, SparsificationPolicy
from kvcat.types import Float, Tensor

_CHUNK = 64  # tokens


class Router(SparsificationPolicy):
    """Keep probabilities from the cosine between a token's projection and its state after a causal summary.

    With h~ = LN(h), q = phi(W_Q h~), k = phi(W_K h~), r = W_V h~, phi = ELU + 1:
    a_t = W_O (q_t^T S_t) / (q_t^T z_t + 1e-6) with S_t = sum_{j<=t} k_j r_j^T, z_t = sum_{j<=t} k_j, and
    p_t = (1 - cos(W_P h_t, h_t + alpha a_t)) / 2.

    At the start W_P = -I and alpha = 0, so every p is exactly 1. The cosine is at its extremum there: the gradient of p
    is zero for every parameter, up to rounding, which Adam's normalisation turns into first steps. ``noise`` on W_P
    leaves that critical point at once; zero is the paper's.

    Computes in the width of its parameters, at least float32, whatever the dtype of the hidden states or of autocast.

    Args:
        hidden_size: width of the hidden states.
        feature_dim: width of q, k and r.
        noise: standard deviation of the Gaussian noise on the entries of W_P, not negative.
        generator: source of the initial weights; None starts one from seed 0. The global random state is not touched.

    Raises:
        InputError: a size below 1 or negative noise.

    References: KV-CAT, appendix "Router parameterization"; Hwang et al. 2025 (H-Net), arXiv:2507.07955.
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
        if hidden_size < 1 or feature_dim < 1 or not noise >= 0:
            given = f"hidden {hidden_size}, features {feature_dim}, noise {noise}"
            raise InputError(
                f"router sizes must be at least 1 and its noise at least 0, got {given}"
            )
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.norm = nn.LayerNorm(hidden_size, dtype=torch.float32)
        self.q_proj = _projection(hidden_size, feature_dim, generator)
        self.k_proj = _projection(hidden_size, feature_dim, generator)
        self.v_proj = _projection(hidden_size, feature_dim, generator)
        self.o_proj = _projection(feature_dim, hidden_size, generator)
        self.p_proj = _projection(hidden_size, hidden_size, generator)
        self.alpha = nn.Parameter(torch.zeros((), dtype=torch.float32))
        with torch.no_grad():
            self.p_proj.weight.normal_(generator=generator).mul_(noise).sub_(torch.eye(hidden_size))

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        generator: Randomness | None = None,  # noqa: ARG002 (the protocol's)
    ) -> Float[Tensor, "batch tokens"]:
        """Keep probabilities p, in [0, 1]; p_t depends on positions up to t only."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            h = hidden.to(dtype)
            weight, bias = self.norm.weight.to(dtype), self.norm.bias.to(dtype)
            normed = functional.layer_norm(
                h, self.norm.normalized_shape, weight, bias, self.norm.eps
            )
            weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(
                dtype
            )
            q, k, v = functional.linear(normed, weights).chunk(3, dim=-1)
            summary = _apply(
                self.o_proj, linear_attention(functional.elu(q) + 1, functional.elu(k) + 1, v)
            )
            cosine = _cosine(_apply(self.p_proj, h), h + self.alpha.to(dtype) * summary)
            return (0.5 - 0.5 * cosine).clamp(0.0, 1.0)


def _cosine(
    a: Float[Tensor, "batch tokens hidden"], b: Float[Tensor, "batch tokens hidden"]
) -> Float[Tensor, "batch tokens"]:
    """<a, b> / (|a| |b|), exactly -1 at a = -b because sqrt(x * x) = x in IEEE arithmetic; -1 where a or b vanishes.

    A vanishing vector, such as the zero embedding of a padding token, is kept: training starts from the dense model.
    """
    squares = (a * a).sum(-1) * (b * b).sum(-1)
    tiny = torch.finfo(a.dtype).tiny
    return torch.where(squares < tiny, -1.0, (a * b).sum(-1) / squares.clamp_min(tiny).sqrt())


def _projection(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear map without bias, uniform in +/- num_inputs ** -0.5 (PyTorch's own range)."""
    layer = nn.Linear(
        num_inputs, num_outputs, bias=False, dtype=torch.float32, device="meta"
    ).to_empty(device="cpu")
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
    """Mean of the values so far, q_t^T S_t / (q_t^T z_t + 1e-6), S_t = sum_{j<=t} k_j v_j^T, z_t = sum_{j<=t} k_j.

    Within a chunk the products q_t.k_j are formed, across chunks only the sums S and z are carried: memory grows as
    tokens * chunk + tokens / chunk * features * channels.

    References: KV-CAT, appendix "Router parameterization"; Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    num_tokens = queries.shape[1]
    chunk = min(_CHUNK, max(num_tokens, 1))
    padding = -num_tokens % chunk
    q, k, v = (
        functional.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, chunk))
        for x in (queries, keys, values)
    )
    v = functional.pad(v, (0, 1), value=1.0)  # a channel of ones makes the normaliser
    sums = (k.transpose(-1, -2) @ v).cumsum(1)
    earlier = functional.pad(sums[:, :-1], (0, 0, 0, 0, 1, 0))
    both = (q @ k.transpose(-1, -2)).tril() @ v + q @ earlier
    return (both[..., :-1] / (both[..., -1:] + 1e-6)).flatten(1, 2)[:, :num_tokens]


def make(*, target: float, **options: Any) -> Router:  # noqa: ARG001 (the budget loss aims at it)
    """The router of one group."""
    return Router(**options)
