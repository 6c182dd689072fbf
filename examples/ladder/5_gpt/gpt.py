"""A GPT with GPT-2's shape, in plain PyTorch: no line of ddpjob, no word of where it runs."""

import math

import torch
from torch import nn
from torch.nn import functional

#: GPT-2's smallest: 124 million parameters; its vocabulary rounded up to a multiple of 64.
GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50304}


class Block(nn.Module):
    """Attention, then a two-layer network, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Sequences of context + 1 tokens -> their mean loss."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # one matrix for both ends
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) ** deep)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.logits(ids[:, :-1])
        # Within the model, so that logits of vocabulary size are not made fp32 on their way out.
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the token after each of (batch, length <= context): (batch, length, vocabulary)."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(
        self, ids: torch.Tensor, count: int, generator: torch.Generator, temperature: float = 0.8
    ) -> torch.Tensor:
        """(batch, length) -> (batch, length + count): one token after the other, drawn."""
        for _ in range(count):
            logits = self.logits(ids[:, -self.context :])[:, -1].float() / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], dim=1)
        return ids
