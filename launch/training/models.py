"""The models that train.py can train, each built from the shape of its data and three sizes.

Every model maps a batch to logits whose last dimension is the classes: ``[B, C]`` for images,
``[B, T, V]`` for text, so that one loss and one accuracy serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Channels that share one GroupNorm mean; small enough that 16 channels still give two groups.
CHANNELS_A_GROUP = 8


@dataclass(frozen=True)
class Sizes:
    """How large a model is.

    Args:
        width: channels of the first stage (resnet), hidden units (mlp), units of the embedding
            and of each layer (lstm, transformer).
        layers: residual blocks a stage (resnet), hidden layers (mlp), layers (lstm, transformer).
        heads: attention heads (transformer only); must divide the width.
        dropout: probability that an activation is dropped in training, in [0, 1).
    """

    width: int
    layers: int
    heads: int = 4
    dropout: float = 0.0


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm and not BatchNorm: BatchNorm's running statistics are no parameters, so no gradient
    exchange keeps them equal, and each rank would evaluate a different model."""
    groups = channels // CHANNELS_A_GROUP if channels % CHANNELS_A_GROUP == 0 else 1
    return nn.GroupNorm(groups, channels)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a way around them (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = group_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = group_norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), group_norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual network for grey images: a strided stem and three stages."""

    def __init__(self, classes: int, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        # The stem halves the picture: three quarters of the arithmetic saved, about one point of
        # accuracy lost on 28x28.
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2, bias=False), group_norm(width), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, channels in enumerate((width, 2 * width, 4 * width)):
            for block in range(sizes.layers):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(channels_in, channels, stride))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.stem(x))
        logits: Tensor = self.head(self.dropout(y.mean(dim=(2, 3))))
        return logits


class MLP(nn.Module):
    """Fully connected layers: few, large tensors, the easiest case for a compressor."""

    def __init__(self, inputs: int, classes: int, sizes: Sizes) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for layer in range(sizes.layers):
            layers += [nn.Linear(sizes.width if layer else inputs, sizes.width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout(sizes.dropout), nn.Linear(sizes.width, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class LanguageLSTM(nn.Module):
    """An LSTM language model: embedding, recurrent layers, decoder.

    Each sequence starts from a zero state, so that sequences can be shuffled and sharded.
    """

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.dropout = nn.Dropout(sizes.dropout)
        self.embedding = nn.Embedding(vocabulary, sizes.width)
        between_layers = sizes.dropout if sizes.layers > 1 else 0.0
        self.lstm = nn.LSTM(
            sizes.width, sizes.width, sizes.layers, batch_first=True, dropout=between_layers
        )
        self.decoder = nn.Linear(sizes.width, vocabulary)
        # PyTorch's N(0, 1) embedding swamps the gates at the start of the training.
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.decoder(self.dropout(hidden))
        return logits


class DecoderBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind its LayerNorm (pre-norm)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        y: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return y


class Decoder(nn.Module):
    """A decoder-only transformer with learned positions and a tied embedding."""

    def __init__(self, vocabulary: int, length: int, sizes: Sizes) -> None:
        super().__init__()
        if sizes.width % sizes.heads:
            raise ValueError(
                f"the transformer's width ({sizes.width}) must be a multiple of its heads"
                f" ({sizes.heads})"
            )
        self.embedding = nn.Embedding(vocabulary, sizes.width)
        self.position = nn.Parameter(torch.empty(length, sizes.width))
        self.blocks = nn.Sequential(*(DecoderBlock(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        x = self.norm(self.blocks(self.dropout(x)))
        # Tied: the embedding is the decoder too, so its gradient is dense.
        return F.linear(x, self.embedding.weight)


def _resnet(shape: tuple[int, ...], classes: int, sizes: Sizes) -> nn.Module:
    return ResNet(classes, sizes)


def _mlp(shape: tuple[int, ...], classes: int, sizes: Sizes) -> nn.Module:
    return MLP(torch.Size(shape).numel(), classes, sizes)


def _lstm(shape: tuple[int, ...], classes: int, sizes: Sizes) -> nn.Module:
    return LanguageLSTM(classes, sizes)


def _transformer(shape: tuple[int, ...], classes: int, sizes: Sizes) -> nn.Module:
    return Decoder(classes, shape[0], sizes)


Builder = Callable[[tuple[int, ...], int, Sizes], nn.Module]
IMAGE_MODELS: dict[str, Builder] = {"resnet": _resnet, "mlp": _mlp}
TEXT_MODELS: dict[str, Builder] = {"lstm": _lstm, "transformer": _transformer}
MODELS: dict[str, Builder] = IMAGE_MODELS | TEXT_MODELS


def build(name: str, shape: tuple[int, ...], classes: int, sizes: Sizes) -> nn.Module:
    """Builds one model, with parameters drawn from torch's default generator.

    Args:
        name: a key of :data:`MODELS`.
        shape: of one example: ``(1, height, width)`` for images, ``(length,)`` for text.
        classes: labels, or tokens in the vocabulary.
        sizes: how large the model is.

    Raises:
        ValueError: the name is unknown, or the sizes do not fit together.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(sorted(MODELS))}")
    return MODELS[name](shape, classes, sizes)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
