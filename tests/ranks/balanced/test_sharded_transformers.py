"""Models of transformers from their configurations, sharded by ``shard="auto"`` and by the user, as in one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import TensorDataset

from tests.ranks.balanced.sharded_kit import Deep, Outcome, Program, alone, on_ranks
from tests.ranks.harness import run_ranks

pytest.importorskip("transformers")

VOCABULARY, LENGTH, PIXELS, STEPS = 32, 6, 8, 7
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, attn_implementation="eager"))


def gpt2() -> nn.Module:
    """Its output layer has the weight of its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **none))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=PIXELS, patch_size=4, num_channels=1, num_labels=4, **SIZES)
    return ViTForImageClassification(config)


class Pretrained(Deep):
    """The step calls the model, as with every model of a library."""

    make = staticmethod(llama)

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.last
        torch.manual_seed(4)
        self.model = self.make().double()
        self.model.train()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0]).logits
        if logits.dim() == 3:  # the next token; the library's own loss is computed in float32
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
        return nn.functional.cross_entropy(logits, batch[1])


class Gpt2(Pretrained):
    make = staticmethod(gpt2)


class ViT(Pretrained):
    make = staticmethod(vit)


class Own(Pretrained):
    """``fully_shard`` as users of these models write it."""

    def configure_model(self) -> None:
        if self.mesh is None or isinstance(self.model, FSDPModule):
            return
        kinds = ("LlamaDecoderLayer", "GPT2Block", "ViTLayer")
        for layer in [m for m in self.model.modules() if type(m).__name__ in kinds]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)


class OwnGpt2(Own):
    make = staticmethod(gpt2)


class OwnViT(Own):
    make = staticmethod(vit)


def tokens() -> TensorDataset:
    ids = torch.randint(0, VOCABULARY, (STEPS * 16, LENGTH), generator=torch.Generator().manual_seed(5))
    return TensorDataset(ids, ids[:, 0])


def images() -> TensorDataset:
    g = torch.Generator().manual_seed(6)
    pixels = torch.randn(STEPS * 16, 1, PIXELS, PIXELS, generator=g, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 4, (STEPS * 16,), generator=g))


once: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 0.5}
text = partial(Program, trainer=once, data=tokens)
PROGRAMS: dict[str, Program] = {
    "Llama, auto": text(Pretrained, {"shard": "auto"}),
    "Llama, own": text(Own),
    "GPT-2, auto": text(Gpt2, {"shard": "auto"}),
    "GPT-2, own": text(OwnGpt2),
    "ViT, auto": Program(ViT, {"shard": "auto"}, once, data=images),
    "ViT, own": Program(OwnViT, {}, once, data=images),
}


@cache
def trained(long: bool) -> list[dict[str, Outcome | str]]:
    return run_ranks(2, on_ranks, {n: p for n, p in PROGRAMS.items() if ("own" in n) == long}, timeout_s=300)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if "own" in n else []) for n in PROGRAMS])
def test_weights_are_those_of_one_process(name: str) -> None:
    expected = alone(PROGRAMS[name])
    for rank in trained("own" in name):
        outcome = rank[name]
        assert not isinstance(outcome, str), outcome
        assert outcome.weights.distance(expected.weights) <= PROGRAMS[name].exact
        assert len(outcome.samples) == STEPS and len(set(outcome.samples)) >= 5
