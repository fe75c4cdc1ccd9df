"""Batched decoding of the small Llama with a key-value cache of fixed slots, refilled as completions finish.

Slots are filled from the lowest free one, and only the slots up to the highest in use are computed, as views, without copies.
Norm gains are folded into the matrices after them, and queries, keys and values come from one product.
"""

from collections.abc import Iterable, Mapping

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor

from aimaster.wire.checkpoint import Version
from rl_runtime.models.tiny import Shape, rotary_tables, rotate
from rl_runtime.rollout.engines import Ending, Generation, Request
from rl_runtime.rollout.sampling import sample, uniforms


class _Layer(msgspec.Struct, frozen=True):
    """Transposed matrices of one layer."""

    attention_in: Tensor
    attention_out: Tensor
    forward_in: Tensor
    forward_out: Tensor


class TinyEngine:
    """See the module; an `Engine`."""

    def __init__(self, shape: Shape, *, slots: int, ending: Ending, temperature: float) -> None:
        self.shape = shape
        self.slots = slots
        self.version: Version | None = None
        self._ending = ending
        self._temperature = temperature
        cache = (
            shape.num_hidden_layers,
            slots,
            shape.num_key_value_heads,
            shape.max_position_embeddings,
            shape.head_size,
        )
        self._keys = torch.zeros(cache)
        self._values = torch.zeros(cache)
        self._cos, self._sin = rotary_tables(shape)
        self._layers: list[_Layer] = []
        self._embedding = torch.empty(0)
        self._head = torch.empty(0)
        self._work: list[Generation | None] = [None] * slots
        self._fresh: list[int] = []
        """Slots whose prompt is still to be read."""

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        layers = []
        for number in range(self.shape.num_hidden_layers):
            name = f"model.layers.{number}."
            inner, outer = weights[name + "input_layernorm.weight"], weights[name + "post_attention_layernorm.weight"]
            query_key_value = torch.cat([weights[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]) * inner
            gate_up = torch.cat([weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]) * outer
            layers.append(
                _Layer(
                    query_key_value.t().contiguous(),
                    weights[name + "self_attn.o_proj.weight"].t().contiguous(),
                    gate_up.t().contiguous(),
                    weights[name + "mlp.down_proj.weight"].t().contiguous(),
                )
            )
        self._layers = layers
        self._embedding = weights["model.embed_tokens.weight"].clone()
        head = self._embedding if self.shape.tie_word_embeddings else weights["lm_head.weight"]
        self._head = (head * weights["model.norm.weight"]).t().contiguous()
        self.version = version

    def add(self, request: Request) -> None:
        slot = self._work.index(None)
        self._work[slot] = Generation.begin(request, ending=self._ending)
        self._fresh.append(slot)

    def drop(self, keys: Iterable[str]) -> None:
        gone = set(keys)
        for slot, generation in enumerate(self._work):
            if generation is not None and generation.request.key in gone:
                self._release(slot)

    def in_work(self) -> list[Generation]:
        return [generation for generation in self._work if generation is not None]

    @torch.no_grad()
    def step(self) -> list[Generation]:
        finished = self._retire()
        used = [slot for slot, generation in enumerate(self._work) if generation is not None]
        if not used or self.version is None:
            return finished
        logits = torch.empty(used[-1] + 1, self.shape.vocab_size)
        if len(self._fresh) < len(used):
            logits = self._decode(used[-1] + 1)
        if self._fresh:
            logits[self._fresh] = self._read(self._fresh)
            self._fresh = []
        self._extend(used, logits)
        return finished + self._retire()

    def _extend(self, used: list[int], logits: Tensor) -> None:
        """Sample one token for each slot in use."""
        assert self.version is not None  # noqa: S101 - `step` returns before
        work = [generation for slot in used if (generation := self._work[slot]) is not None]
        numbers = uniforms([one.request.seed for one in work], [len(one.tokens) for one in work])
        tokens, logprobs = sample(logits[used], numbers, temperature=self._temperature)
        for generation, token, logprob in zip(work, tokens, logprobs, strict=True):
            generation.append(token, logprob, self.version, ending=self._ending)

    def _retire(self) -> list[Generation]:
        finished = []
        for slot, generation in enumerate(self._work):
            if generation is not None and generation.finish:
                finished.append(generation)
                self._release(slot)
        return finished

    def _release(self, slot: int) -> None:
        self._work[slot] = None
        if slot in self._fresh:
            self._fresh.remove(slot)

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.rms_norm_eps)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [..., heads, head size] of the joint product."""
        heads, groups = self.shape.num_attention_heads, self.shape.num_key_value_heads
        parts = projected.view(*projected.shape[:-1], heads + 2 * groups, self.shape.head_size)
        return parts[..., :heads, :], parts[..., heads : heads + groups, :], parts[..., heads + groups :, :]

    def _feed_forward(self, x: Tensor, layer: _Layer) -> Tensor:
        gate_up = self._norm(x) @ layer.forward_in
        width = self.shape.intermediate_size
        return x + (F.silu(gate_up[..., :width]) * gate_up[..., width:]) @ layer.forward_out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Tensor | bool) -> Tensor:
        grouped = self.shape.num_key_value_heads != self.shape.num_attention_heads
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask)  # type: ignore[arg-type]

    def _read(self, slots: list[int]) -> Tensor:
        """Read prompts (and prefixes) into the cache and return the logits after them."""
        texts = [
            (*generation.request.prompt_tokens, *generation.tokens)
            for slot in slots
            if (generation := self._work[slot]) is not None
        ]
        length = max(len(text) for text in texts)
        ids = torch.tensor([text + (0,) * (length - len(text)) for text in texts])
        rows = torch.tensor(slots)
        x = self._embedding[ids]
        cos, sin = self._cos[:length], self._sin[:length]
        for number, layer in enumerate(self._layers):
            query, key, value = (part.transpose(1, 2) for part in self._split(self._norm(x) @ layer.attention_in))
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            # Right padding writes beyond a row's end; each such place is written again before it is first looked at.
            self._keys[number, rows, :, :length] = key
            self._values[number, rows, :, :length] = value
            mixed = self._attend(query, key, value, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2) @ layer.attention_out
            x = self._feed_forward(x, layer)
        last = torch.tensor([len(text) - 1 for text in texts])
        return self._norm(x[torch.arange(len(texts)), last]) @ self._head

    def _decode(self, count: int) -> Tensor:
        """Run the newest token of the first `count` slots; rows of free and of unread slots are computed and not looked at."""
        token, place = [0] * count, [0] * count
        for slot in range(count):
            generation = self._work[slot]
            if generation is not None and slot not in self._fresh:
                token[slot] = generation.tokens[-1]
                place[slot] = len(generation.request.prompt_tokens) + len(generation.tokens) - 1
        at, longest = torch.tensor(place), max(place) + 1
        rows = torch.arange(count)
        x = self._embedding[torch.tensor(token)]
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        mask = (torch.arange(longest)[None] <= at[:, None])[:, None, None]
        for number, layer in enumerate(self._layers):
            query, key, value = self._split(self._norm(x) @ layer.attention_in)
            keys, values = self._keys[number], self._values[number]
            keys[rows, :, at] = rotate(key, cos, sin)
            values[rows, :, at] = value
            query = rotate(query, cos, sin)[:, :, None]
            mixed = self._attend(query, keys[:count, :, :longest], values[:count, :, :longest], attn_mask=mask)
            x = x + mixed.flatten(1) @ layer.attention_out
            x = self._feed_forward(x, layer)
        return self._norm(x) @ self._head
