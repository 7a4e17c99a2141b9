"""Twelve kinds of public models at small sizes, random weights, built offline: what they learn from, and their step.

timm, transformers and diffusers are imported only for the models that are theirs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, ...]
StepFn = Callable[..., Any]


@dataclass
class Subject:
    """One thing to train.

    Attributes:
        modules: those that are prepared.
        optimizers: for each of the modules that learns, in order.
        step: gets the loop, modules and optimizers, and gives the function that is captured.
        batch: draws one batch.
    """

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[Any, list[nn.Module], list[Any]], StepFn]
    batch: Callable[[torch.Generator], Batch]


def supervised(model: nn.Module, loss_of: Callable[..., torch.Tensor], batch: Any) -> Subject:
    """One model, one AdamW, clipping at norm 1."""

    def step(loop: Any, modules: list[nn.Module], optimizers: list[Any]) -> StepFn:
        [model], [optimizer] = modules, optimizers

        def train(*batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, *batch)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        return train

    return Subject([model], [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)], step, batch)


def images(generator: torch.Generator) -> Batch:
    return (
        torch.randn(32, 3, 64, 64, generator=generator),
        torch.randint(10, (32,), generator=generator),
    )


def tokens(generator: torch.Generator) -> Batch:
    return (torch.randint(500, (16, 64), generator=generator),)


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def timm_model(name: str, **options: Any) -> Subject:
    import timm

    return supervised(timm.create_model(name, num_classes=10, **options), classify, images)


def bert() -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )

    def batch(generator: torch.Generator) -> Batch:
        x = torch.randint(500, (16, 64), generator=generator)
        mask = torch.arange(64) < torch.randint(32, 65, (16, 1), generator=generator)
        masked = torch.rand(16, 64, generator=generator) < 0.15
        return x.masked_fill(masked, 3), mask.long(), x.masked_fill(~(masked & mask), -100)

    def loss(model: nn.Module, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(input_ids=x, attention_mask=mask, labels=y).loss

    return supervised(BertForMaskedLM(config), loss, batch)


def language_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=500, n_embd=128, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return supervised(GPT2LMHeadModel(config), language_loss, tokens)


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return supervised(LlamaForCausalLM(config), language_loss, tokens)


def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=500,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return supervised(T5ForConditionalGeneration(config), language_loss, tokens)


def unet() -> Subject:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64, 128), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def batch(generator: torch.Generator) -> Batch:
        return (
            torch.randn(16, 3, 32, 32, generator=generator),
            torch.randn(16, 3, 32, 32, generator=generator),
            torch.randint(1000, (16,), generator=generator),
        )

    def loss(model: nn.Module, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        kept = torch.cos(t / 1000 * math.pi / 2)[:, None, None, None]
        return F.mse_loss(model(kept * x + (1 - kept**2).sqrt() * noise, t).sample, noise)

    return supervised(model, loss, batch)


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, 128)
        self.body = nn.Transformer(128, 4, 2, 2, 256, batch_first=True)
        self.head = nn.Linear(128, 500)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.head(self.body(self.tokens(x), self.tokens(y), tgt_mask=causal, tgt_is_causal=True))


def transformer() -> Subject:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x, x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    return supervised(Translator(), loss, tokens)


def lstm() -> Subject:
    from benchmarks.series_models import SeriesLSTM

    def batch(generator: torch.Generator) -> Batch:
        x = torch.randn(128, 64, 32, generator=generator)
        return x, x[:, -8:, 0].sum(1, keepdim=True)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    return supervised(SeriesLSTM(), loss, batch)


def gan() -> Subject:
    maker = nn.Sequential(
        nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 4),
    )  # fmt: skip

    def step(loop: Any, modules: list[nn.Module], optimizers: list[Any]) -> StepFn:
        [maker, judge], [made, judged] = modules, optimizers

        def train(noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            judged.zero_grad()
            fake = maker(noise)
            worse = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            loop.backward(worse)
            judged.step()
            made.zero_grad()
            better = F.softplus(-judge(fake)).mean()
            loop.backward(better)
            made.step()
            return worse + better

        return train

    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(64, 64, 1, 1, generator=generator), torch.randn(64, 3, 16, 16, generator=generator)

    optimizers = [
        torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True) for m in (maker, judge)
    ]
    return Subject([maker, judge], list(optimizers), step, batch)


def teacher_student() -> Subject:
    def step(loop: Any, modules: list[nn.Module], optimizers: list[Any]) -> StepFn:
        [student], [optimizer] = modules, optimizers
        teacher = copy.deepcopy(student)
        taught, teaching = list(student.parameters()), list(teacher.parameters())

        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = teacher(x).softmax(1)
            out = student(x)
            loss = F.cross_entropy(out, y) + F.cross_entropy(out, wanted)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            with torch.no_grad():
                torch._foreach_lerp_(teaching, taught, 0.01)
            return loss

        return train

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return Subject([model], [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)], step, images)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "timm resnet18": lambda: timm_model("resnet18"),
    "timm vit_tiny": lambda: timm_model("vit_tiny_patch16_224", img_size=64, patch_size=8),
    "timm convnext_atto": lambda: timm_model("convnext_atto"),
    "transformers BERT": bert,
    "transformers GPT-2": gpt2,
    "transformers Llama": llama,
    "transformers T5": t5,
    "diffusers UNet": unet,
    "nn.Transformer": transformer,
    "nn.LSTM": lstm,
    "GAN, two optimizers": gan,
    "teacher-student, EMA": teacher_student,
}
