"""A small Llama given by its sizes: the mathematics and the parameter names of transformers' LlamaForCausalLM, in torch alone.

It exists because importing transformers takes twice as long as importing torch, and a restarted member of a small run should be
back in a second or two. A test compares it with transformers, tensor by tensor.
"""

import math

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from rl_runtime.algo.packing import Layout
from rl_runtime.models.base import ModelFolderError


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, under the names of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    intermediate_size: int = 192
    max_position_embeddings: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def check(self) -> None:
        """Refuse sizes that do not divide."""
        for whole, part in (
            ("hidden_size", "num_attention_heads"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ModelFolderError(
                    f"[aimaster.model] {whole} = {getattr(self, whole)} is not a multiple of {part} = {getattr(self, part)}:"
                    " choose sizes that divide"
                )


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [position, head_size]."""
    half = torch.arange(0, shape.head_size, 2).float() / shape.head_size
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to the last dimension."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.num_attention_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        split = (rows, length, -1, self.shape.head_size)
        query, key, value = (
            projection(x).view(split).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        grouped = self.shape.num_key_value_heads != self.shape.num_attention_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)


class TinyLlama(nn.Module):
    """The trainable model; a CausalModel by itself."""

    lays_out = False
    """Prompts are short here: one pass over padded rows costs less than several over packed ones."""

    def __init__(self, shape: Shape, *, seed: int) -> None:
        shape.check()
        super().__init__()
        self.shape = shape
        self.max_length = shape.max_position_embeddings
        self.model = Body(shape)
        if not shape.tie_word_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    @property
    def module(self) -> nn.Module:
        return self

    def hidden(self, ids: Tensor, layout: Layout | None = None) -> Tensor:
        assert layout is None  # noqa: S101 - see lays_out
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, head_weight(self))

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw by the inverse square root of the inputs, what feeds the residual stream smaller by its depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            scale = 0.02 if "embed_tokens" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= math.sqrt(2 * self.shape.num_hidden_layers)
            if name == "lm_head.weight":
                scale = 0.02
            parameter.normal_(0.0, scale, generator=generator)


def head_weight(model: TinyLlama) -> Tensor:
    """Return the output embedding, tied or not."""
    weight = model.model.embed_tokens.weight if model.shape.tie_word_embeddings else model.lm_head.weight
    assert isinstance(weight, Tensor)  # noqa: S101 - nn.Module types its attributes Tensor | Module
    return weight
