"""The Transformer memory, and the ring buffer of keys and values for acting step by step.

    h = dropout(W x + position(time_idx))                   episode time, not position in the window
    h = h + norm2(attention(norm1(h)))                      norm2, norm4: NormFormer
    h = h + dropout(W2 norm4(act(W1 norm3(h))))             all W but the first are sigma-scaled
    out = norm(h)                                           after the last layer

Meaning of `context`: in every layer a timestep attends to the last `context` timesteps, including
itself. Training uses a band mask and acting keeps the last `context` keys and values of each layer,
so both compute the same function for any length. As in every windowed Transformer with n layers, a
timestep can depend on timesteps up to n * (context - 1) earlier, through those in between. Training
windows shorter than that do not train this dependence; a context as long as the episode avoids it.

    ring, context = 4, after 6 timesteps:   slot   0  1  2  3
                                            time   4  5  2  3     next write: slot 6 mod 4 = 2
    with one sink, after 7 timesteps:       slot   0  1  2  3  4
                                            time   0  5  6  3  4  slot 0 is never overwritten

Sinks are the first timesteps of the input: of the episode in acting, of the window in training. The
order of the slots does not matter, because positions are added to the input, or rotate keys and
queries before they are stored (rotary). `steps` is a count per environment, so environments reset
independently: reset sets the count to 0, and old slots are masked until overwritten. Letters: N
environments, H heads, E width of a head, W slots (n_sinks + context).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.attention.causal_attention import Attention
from amago_model.config import TransformerConfig
from amago_model.data.packing import Packing
from amago_model.layers import apply_flat, make_activation, make_norm
from amago_model.running_statistics import SelfUpdating


@dataclass(slots=True)
class TransformerHidden:
    """The hidden state of N environments. `step` modifies it in place."""

    keys: Tensor
    """[n_layers, N, H, W, E]"""
    values: Tensor
    """[n_layers, N, H, W, E]"""
    steps: Tensor
    """[N] int64: timesteps since the start of the episode."""


class SigmaLinear(SelfUpdating):
    """A linear layer whose matrix has the learned spectral norm gamma (sigma reparametrisation).

    The layer uses gamma / sigma * W, where sigma = u' W v is the largest singular value of W,
    tracked by one power iteration per forward pass in training (Zhai et al. 2023, "Stabilizing
    Transformer Training by Preventing Attention Entropy Collapse").
    """

    def __init__(self, d_input: int, d_output: int, *, bias: bool = True) -> None:
        super().__init__()
        weight = torch.empty(d_output, d_input)
        nn.init.trunc_normal_(weight, std=0.02)
        u, _, vh = torch.linalg.svd(weight, full_matrices=False)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(d_output)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        self.register_buffer("u", u[:, 0].clone())
        self.register_buffer("v", vh[0].clone())
        self._cache: tuple[object, Tensor] | None = None

    u: Tensor
    v: Tensor

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.u, self.v
        if self.training and not self.frozen:
            u, v = self.iterate()
        acting = not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        matrix = self._cached_matrix() if acting else self._matrix(u, v)
        return F.linear(x, matrix, self.bias)

    def _matrix(self, u: Tensor, v: Tensor) -> Tensor:
        with _no_autocast(self.weight):
            return self.weight * (self.gamma / torch.dot(u, self.weight @ v))

    def _cached_matrix(self) -> Tensor:
        """The scaled matrix, cached for acting, where computing it costs as much as applying it.

        It is recomputed after the weights have changed or the mode was set.
        """
        sources = (self.weight, self.gamma, self.u, self.v)
        if any(x.is_inference() for x in sources):
            return self._matrix(self.u, self.v)
        state = [(x.data_ptr(), x._version) for x in sources]
        if self._cache is None or self._cache[0] != state:
            self._cache = (state, self._matrix(self.u, self.v))
        return self._cache[1]

    def train(self, mode: bool = True) -> SigmaLinear:
        self._cache = None  # a fused optimiser does not change `_version`
        return super().train(mode)

    @torch.no_grad()
    def iterate(self) -> tuple[Tensor, Tensor]:
        with _no_autocast(self.weight):
            u = F.normalize(self.weight @ self.v, dim=0)
            v = F.normalize(self.weight.T @ u, dim=0)
        # sigma uses the new tensors, because the buffers may change before the backward pass.
        self.u.copy_(u)
        self.v.copy_(v)
        return u, v


def _no_autocast(weight: Tensor) -> torch.autocast:
    """Disables autocast, which would round sigma to three digits; these products are cheap."""
    return torch.autocast(weight.device.type, enabled=False)


def _linear(config: TransformerConfig, d_input: int, d_output: int, bias: bool = True) -> nn.Module:
    if config.sigma_reparam:
        return SigmaLinear(d_input, d_output, bias=bias)
    return nn.Linear(d_input, d_output, bias=bias)


@lru_cache(maxsize=16)
def _frequencies(width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
        return 10_000.0**-exponent


def sinusoid(time_idx: Tensor, width: int) -> Tensor:
    """[...] int64 -> [..., width]: sines on even channels, cosines on odd (Vaswani et al. 2017)."""
    angle = time_idx.unsqueeze(-1) * _frequencies(width, time_idx.device)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [N, 1, L, E / 2] each."""


def rotation_of(time_idx: Tensor, width: int) -> Rotation:
    """The rotation of queries and keys of this width, from time_idx [N, L]."""
    angle = time_idx[:, None, :, None] * _frequencies(width, time_idx.device)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [N, H, L, E], channel i paired with i + E / 2 (Su et al. 2021): scores between rotated
    queries and keys depend only on the difference of their times."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class TransformerLayer(nn.Module):
    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        d, h = config.d_model, config.n_heads
        extra = config.norm if config.normformer_norms else "none"
        self.config, self.attention = config, attention
        self.norm1, self.norm2 = make_norm(config.norm, d), make_norm(extra, d)
        self.norm3, self.norm4 = make_norm(config.norm, d), make_norm(extra, config.d_ff)
        self.qkv = _linear(config, d, 3 * d, bias=False)
        self.q_norm, self.k_norm = (make_norm(config.qk_norm, d // h) for _ in "qk")
        self.head_scale = nn.Parameter(torch.ones(h, 1, 1)) if config.head_scaling else None
        self.out = _linear(config, d, d)
        self.ff1, self.ff2 = _linear(config, d, config.d_ff), _linear(config, config.d_ff, d)
        self.activation = make_activation(config.activation)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """[N, L, D] -> queries, keys, values, each [N, H, L, E]."""
        c = self.config
        qkv = F.dropout(self.qkv(self.norm1(x)), c.dropout_qkv, self.training)
        q, k, v = qkv.unflatten(-1, (3, c.n_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """The part of a layer after attention: x [N, L, D], attended [N, H, L, E] -> [N, L, D]."""
        if self.head_scale is not None:
            attended = attended * self.head_scale
        x = x + self.norm2(self.out(attended.transpose(1, 2).flatten(2)))
        added = apply_flat(self._feed_forward, x)
        return x + F.dropout(added, self.config.dropout_ff, self.training)

    def _feed_forward(self, rows: Tensor) -> Tensor:
        return self.ff2(self.norm4(self.activation(self.ff1(self.norm3(rows)))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, rotation: Rotation | None, packing: Packing | None) -> Tensor:
        q, k, v = self.project(x, rotation)
        dropout = self.config.dropout_attn if self.training else 0.0
        if packing is None:
            return self.combine(x, self.attention.attend(q, k, v, dropout))
        return self.combine(x, self.attention.attend_packed(q, k, v, packing, dropout))

    def step(
        self,
        x: Tensor,
        rotation: Rotation | None,
        keys: Tensor,
        values: Tensor,
        env: Tensor,
        slot: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """x [N, 1, D] -> [N, 1, D]: write key and value into [N, H, W, E] at `slot`, and attend."""
        q, k, v = self.project(x, rotation)
        keys[env, :, slot] = k[:, :, 0].to(keys.dtype)
        values[env, :, slot] = v[:, :, 0].to(values.dtype)
        return self.combine(
            x, self.attention.attend_cached(q, keys.to(q.dtype), values.to(q.dtype), visible)
        )


class Transformer(nn.Module):
    """[B, L, D_in] and time_idx [B, L] to [B, L, d_model]; `step` computes the same for one
    timestep.

    With a packing, B is 1 and L is the timesteps of all windows; only attention uses the packing.
    """

    def __init__(self, config: TransformerConfig, d_input: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(d_input, config.d_model)
        self.attention = Attention(config)
        self.layers = nn.ModuleList(
            TransformerLayer(config, self.attention) for _ in range(config.n_layers)
        )
        self.norm = make_norm(config.norm, config.d_model)
        self.position: nn.Embedding | None = None
        if config.position.kind == "learnable":
            self.position = nn.Embedding(config.position.max_time, config.d_model)
            nn.init.trunc_normal_(self.position.weight, std=0.02)

    @property
    def d_output(self) -> int:
        return self.config.d_model

    @property
    def attention_name(self) -> str:
        """The attention back-end in use, for logs."""
        return self.attention.name

    def kernels(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """The attention kernel of windows on this device; ConfigError if it is unsupported."""
        c = self.config
        return {"attention": self.attention.plan(device, dtype, c.n_heads, c.d_model // c.n_heads)}

    def _embed(self, x: Tensor, time_idx: Tensor) -> tuple[Tensor, Rotation | None]:
        c, h, rotation = self.config, self.embed(x), None
        if c.position.kind == "sinusoidal":
            h = h + sinusoid(time_idx, c.d_model).to(h.dtype)
        elif self.position is not None:
            h = h + self.position(time_idx.clamp(0, self.position.num_embeddings - 1)).to(h.dtype)
        elif c.position.kind == "rotary":
            rotation = rotation_of(time_idx, c.d_model // c.n_heads)
        return F.dropout(h, c.dropout_emb, self.training), rotation

    def prefers_packing(self, device: torch.device) -> bool:
        """Whether attention has a kernel for packed windows on this device."""
        c, dtype = self.config, self.embed.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return self.attention.has_packed_kernel(device, dtype, c.n_heads, c.d_model // c.n_heads)

    def forward(self, x: Tensor, time_idx: Tensor, packing: Packing | None = None) -> Tensor:
        h, rotation = self._embed(x, time_idx)
        for layer in self.layers:
            h = layer(h, rotation, packing)
        out: Tensor = self.norm(h)
        return out

    def initial_hidden(self, n: int, device: torch.device | str) -> TransformerHidden:
        c = self.config
        shape = (c.n_layers, n, c.n_heads, c.n_sinks + c.context, c.d_model // c.n_heads)
        dtype = self.embed.weight.dtype
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        steps = torch.zeros(n, dtype=torch.int64, device=device)
        return TransformerHidden(keys=keys, values=values, steps=steps)

    def step(
        self, x: Tensor, time_idx: Tensor, hidden: TransformerHidden
    ) -> tuple[Tensor, TransformerHidden]:
        """x [N, 1, D_in], time_idx [N, 1] -> [N, 1, d_model]. Modifies `hidden` in place."""
        sinks, context, device = self.config.n_sinks, self.config.context, x.device
        steps = hidden.steps
        slot = torch.where(steps < sinks, steps, sinks + (steps - sinks) % context)
        env = torch.arange(x.shape[0], device=device)
        # Slots are filled in order, so until the ring is full, slots after `steps` are unwritten.
        written = torch.arange(sinks + context, device=device) <= steps.unsqueeze(1)
        visible = written[:, None, None, :]
        h, rotation = self._embed(x, time_idx)
        for i, layer in enumerate(self.layers):
            h = layer.step(h, rotation, hidden.keys[i], hidden.values[i], env, slot, visible)  # type: ignore[operator]
        hidden.steps += 1
        return self.norm(h), hidden

    def reset_hidden(self, hidden: TransformerHidden, done: Tensor) -> TransformerHidden:
        hidden.steps.masked_fill_(done, 0)
        return hidden
