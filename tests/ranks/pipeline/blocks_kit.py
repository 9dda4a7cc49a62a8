"""Off-the-shelf models, unmodified, made from their configurations: blocks called with more than the last output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

WORDS, LENGTH, WIDTH, BLOCKS = 24, 7, 8, 4


class Sentences(Dataset):
    """Words, a mask of those that are there, and a target; or pictures."""

    def __init__(self, samples: int = 48, *, pictures: bool = False, padded: bool = True) -> None:
        g = torch.Generator().manual_seed(4)
        self.ids = torch.randint(3, WORDS, (samples, LENGTH), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (samples, 1), generator=g)
        self.mask = (torch.arange(LENGTH) < lengths).long() if padded else torch.ones(samples, LENGTH).long()
        self.y = torch.randint(0, 2, (samples,), generator=g)
        self.pixels = torch.randn(samples, 3, 8, 8, generator=g, dtype=torch.float64) if pictures else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if self.pixels is not None:
            return {"pixel_values": self.pixels[i], "labels": self.y[i]}
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.y[i]}


class Trained(LightningModule):
    """Any model whose loss is a mean over samples."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = model, loss
        torch.manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape) * 0.2)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("loss", loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self._loss(self.net, batch), batch_size=len(batch["labels"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


# ---- transformers ----------------------------------------------------------------------------------------------


def causal(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples of each sample's mean: words of another sample change nothing."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    kept = batch["attention_mask"][:, 1:]
    return ((losses * kept).sum(1) / kept.sum(1)).mean()


def classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def gpt2() -> Trained:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=BLOCKS, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0,
    )  # fmt: skip
    return Trained(transformers.GPT2LMHeadModel(config), causal)


def llama(**options: Any) -> Trained:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=BLOCKS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, **options,
    )  # fmt: skip
    return Trained(transformers.LlamaForCausalLM(config), causal)


def bert() -> Trained:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Trained(transformers.BertForSequenceClassification(config), classified)


def vit() -> Trained:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=2, intermediate_size=12, image_size=8,
        patch_size=4,
    )  # fmt: skip
    return Trained(transformers.ViTForImageClassification(config), classified)


def checkpointed() -> Trained:
    """With gradient checkpointing as the model itself does it."""
    module = llama(use_cache=False)
    module.net.activation_checkpointing_enable()  # type: ignore[operator]
    return module


# ---- torch, and models of one's own ----------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask and one for padding."""

    def __init__(self, *, causal: bool = True, nested: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype) if self.causal else None
        x = self.encoder(x, mask=mask, src_key_padding_mask=batch["attention_mask"] == 0)
        return F.cross_entropy(self.head(x[:, 0]), batch["labels"])


class Tupled(nn.Module):
    """A block that returns what the model takes apart: the output, a bias handed on, weights that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, *, hidden: Tensor, skip: Tensor, bias: Tensor | None, scale: float, kind: dict[str, Any]) -> Any:
        bias = self.own_bias if bias is None else bias + self.own_bias
        x = hidden + self.linear(hidden).tanh() * kind["scale"].to(kind["dtype"]) * scale + bias
        return x + skip, bias, x.softmax(-1)


class Own(nn.Module):
    """Keyword calls, tuples taken apart, an input for each block with a gradient, blocks without, checkpointing."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)
        self.places = nn.ModuleList([nn.Embedding(LENGTH, WIDTH) for _ in range(BLOCKS)])
        self.layers = nn.ModuleList([Tupled() for _ in range(BLOCKS)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.checkpoints = checkpoints

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        first = hidden = self.embed(batch["input_ids"])
        bias, kind = None, {"scale": self.scale, "dtype": first.dtype}
        for i, (layer, place) in enumerate(zip(self.layers, self.places, strict=True)):
            skip = first * 0.1 + place(torch.arange(LENGTH))
            options = {"hidden": hidden, "skip": skip, "bias": bias, "scale": 1.0 / (i + 1), "kind": kind}
            if self.checkpoints:
                out = checkpoint(layer, use_reentrant=False, **options)
            else:
                out = layer(**options)
            if i % 2:
                hidden, bias, _ = out
            else:
                hidden = out[0] if isinstance(out, tuple) else out
                bias = out[1]
        return F.cross_entropy(self.head(hidden.mean(1)), batch["labels"])


def encoder() -> Trained:
    return Trained(Encoder(), lambda net, batch: net(batch))


def padded_encoder() -> Trained:
    """In evaluation its layers get nested tensors, without the padding."""
    return Trained(Encoder(causal=False, nested=True), lambda net, batch: net(batch))


def own(checkpoints: bool = False) -> Trained:
    return Trained(Own(checkpoints), lambda net, batch: net(batch))


def own_checkpointed() -> Trained:
    return own(checkpoints=True)


Make = Callable[..., Trained]

MODELS: dict[str, tuple[Make, str | None]] = {  # and the backbone's name
    "GPT-2": (gpt2, "net.transformer.h"),
    "Llama": (llama, "net.model.layers"),
    "BERT": (bert, "net.bert.encoder.layer"),
    "ViT": (vit, "net.vit.layers"),
    "Llama, checkpointing": (checkpointed, "net"),
    "nn.TransformerEncoder": (encoder, "net.encoder"),
    "a loop of one's own": (own, "net.layers"),
    "a loop, checkpointing": (own_checkpointed, "net.layers"),
    "found": (gpt2, None),
}
