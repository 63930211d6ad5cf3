"""Models of transformers and timm from tiny configurations, by width, with a batch for each."""

from __future__ import annotations

from typing import Any

import operators  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mukron

HEAD, TOKENS, LENGTH, CLASSES = 8, 32, 8, 3
BASE_WIDTH, WIDTH = 16, 32

# transformers


def gpt2(width: int = WIDTH) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": width, "n_head": width // HEAD, "n_layer": 1, "n_positions": LENGTH, "vocab_size": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    model.lm_head.register_forward_pre_hook(lambda module, x: (x[0] * BASE_WIDTH / width,))  # its weight is tied
    return model


def bert(width: int = WIDTH) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    texts = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH}
    return BertForSequenceClassification(BertConfig(**encoder(width), **texts))


def llama(width: int = WIDTH) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1}
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": width // (2 * HEAD), "head_dim": HEAD}
    texts = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **texts))


def vit(width: int = WIDTH) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**encoder(width), image_size=8, patch_size=4))


def encoder(width: int) -> dict[str, Any]:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1}
    return {**sizes, **dropout, "num_attention_heads": width // HEAD, "num_labels": CLASSES}


def masked_bert(width: int = WIDTH) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**encoder(width), vocab_size=TOKENS, max_position_embeddings=LENGTH))
    head = model.get_submodule("cls.predictions.decoder")  # its weight is tied
    head.register_forward_pre_hook(lambda module, x: (x[0] * BASE_WIDTH / width,))
    return model


def gemma(width: int = WIDTH, hook: bool = True) -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "tie_word_embeddings": False}
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": width // (2 * HEAD), "head_dim": HEAD}
    texts = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    model = GemmaForCausalLM(GemmaConfig(**sizes, **heads, **texts))
    if hook:  # it multiplies its embeddings by width**0.5
        embedding = model.get_submodule("model.embed_tokens")
        embedding.register_forward_hook(lambda module, x, output: output * (BASE_WIDTH / width) ** 0.5)
    return model


def t5(width: int = WIDTH, power: float = 0.5) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": width, "d_kv": HEAD, "d_ff": 4 * width, "num_layers": 1, "num_heads": width // HEAD}
    config = T5Config(**sizes, vocab_size=TOKENS, decoder_start_token_id=0, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config)
    # its head is tied, and it multiplies what goes into it by width**-0.5
    model.lm_head.register_forward_pre_hook(lambda module, x: (x[0] * (BASE_WIDTH / width) ** power,))
    return model


HF_MODELS = {"GPT-2": gpt2, "BERT": bert, "Llama": llama, "ViT": vit}
HOOKED_MODELS = {"BERT for masked words": masked_bert, "Gemma": gemma, "T5": t5}
LANGUAGE = ("GPT-2", "Llama", *HOOKED_MODELS)
ROLES = {
    gpt2: {"transformer.wte.weight": "input"},
    masked_bert: {"bert.embeddings.word_embeddings.weight": "input"},
    t5: {"shared.weight": "input"},
}


def samples(name: str, count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        inputs = [{"pixel_values": torch.randn(3, 8, 8, generator=generator)} for _ in range(count)]
    else:
        inputs = [{"input_ids": torch.randint(TOKENS, (LENGTH,), generator=generator)} for _ in range(count)]
    if name in LANGUAGE:
        return [{**one, "labels": one["input_ids"]} for one in inputs]
    return [{**one, "labels": torch.tensor(number % CLASSES)} for number, one in enumerate(inputs)]


def cross_entropy(returned: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(returned.logits.flatten(0, -2), y.flatten())


# timm


def timm_resnet(width: int = WIDTH) -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    channels = (width, width, 2 * width, 2 * width)
    stem = {"stem_type": "deep", "stem_width": width // 2}
    return ResNet(BasicBlock, layers=(1, 1, 1, 1), channels=channels, num_classes=CLASSES, **stem)


def timm_vit(width: int = WIDTH) -> nn.Module:
    from timm.models import VisionTransformer

    sizes = {"embed_dim": width, "num_heads": width // HEAD, "depth": 1}
    return VisionTransformer(img_size=16, patch_size=4, num_classes=CLASSES, **sizes)


def timm_mixer(width: int = WIDTH) -> nn.Module:
    from timm.models import MlpMixer

    return MlpMixer(img_size=16, patch_size=4, embed_dim=width, num_blocks=1, num_classes=CLASSES)


def timm_convnext(width: int = WIDTH) -> nn.Module:
    from timm.models import ConvNeXt

    channels = (width, width, 2 * width, 2 * width)
    return ConvNeXt(depths=(1, 1, 1, 1), dims=channels, patch_size=1, num_classes=CLASSES)


def timm_efficientnet(width: int = WIDTH) -> nn.Module:
    """One block of each kind; its own multiplier would round channels."""
    from timm.models import EfficientNet
    from timm.models._efficientnet_builder import decode_arch_def

    blocks = decode_arch_def([[f"ds_r1_k3_s1_e1_c{width}_se0.25"], [f"ir_r1_k3_s2_e2_c{2 * width}_se0.25"]])
    sizes = {"stem_size": width, "num_features": 4 * width}
    return EfficientNet(blocks, num_classes=CLASSES, **sizes)


TIMM_MODELS = {
    "ConvNeXt": timm_convnext,
    "EfficientNet": timm_efficientnet,
    "Mixer": timm_mixer,
    "ResNet": timm_resnet,
    "ViT": timm_vit,
}


def pictures(count: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(count) % CLASSES


# optimizers

METHODS: dict[str, tuple[type[torch.optim.Optimizer], float]] = {
    "AdamW": (torch.optim.AdamW, 3e-3),
    "K-FAC": (mukron.KFAC, 0.05),
    "Muon": (mukron.Muon, 0.05),
    "Shampoo": (mukron.Shampoo, 0.05),
    "SOAP": (mukron.SOAP, 0.02),
}


def planned(factory: Any, width: int = WIDTH, seed: int = 0) -> tuple[nn.Module, mukron.Parametrization]:
    """A model in muP, with its plan."""
    torch.manual_seed(seed)
    model = factory(width)
    return model, mukron.parametrize(model, mukron.base_shapes(factory, width=BASE_WIDTH, roles=ROLES.get(factory)))


def options_of(method: str, name: str) -> dict[str, Any]:
    """Arguments beside the learning rate: K-FAC must know where the classes are in an output with positions."""
    return {"class_dim": -1} if method == "K-FAC" and name in LANGUAGE else {}


def exactly(method: str) -> dict[str, Any]:
    """Arguments for a comparison of two orders of sums: Muon orthogonalizes in bfloat16 unless it is told otherwise."""
    return {"precision": "float32"} if method == "Muon" else {}
