"""Models of transformers and timm, from configurations, pass ``base_shapes`` and ``parametrize`` without roles.

Whether muP then holds is a matter of their forward passes, too: test_coordinates.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import ParametrizationError, base_shapes, parametrize
from mukron.theory import Role

transformers = pytest.importorskip("transformers")
HEAD = 8  # the size of an attention head, at every width
TOKENS = 50


def _sizes(width: int) -> dict[str, int]:
    return {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": width // HEAD}


def _llama_like(width: int) -> dict[str, int]:
    return {
        **_sizes(width),
        "intermediate_size": 3 * width,
        "num_key_value_heads": width // (2 * HEAD),
        "head_dim": HEAD,
        "vocab_size": TOKENS,
        "max_position_embeddings": 32,
    }


def _bert_like(width: int) -> dict[str, int]:
    return {**_sizes(width), "intermediate_size": 4 * width, "vocab_size": TOKENS, "max_position_embeddings": 32}


def gpt2(width: int, **more: bool) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=width, n_layer=2, n_head=width // HEAD, n_positions=32, vocab_size=TOKENS, **more
    )
    return transformers.GPT2LMHeadModel(config)


def untied_gpt2(width: int) -> nn.Module:
    return gpt2(width, tie_word_embeddings=False)


def bert(width: int) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_bert_like(width), num_labels=3))


def llama(width: int, tied: bool = False) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_like(width), tie_word_embeddings=tied))


def mistral(width: int) -> nn.Module:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**_llama_like(width), tie_word_embeddings=False, sliding_window=16)
    )


def qwen2(width: int) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_llama_like(width), tie_word_embeddings=False))


def gemma(width: int) -> nn.Module:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**_llama_like(width), tie_word_embeddings=False))


def t5(width: int) -> nn.Module:
    config = transformers.T5Config(
        d_model=width, d_kv=HEAD, d_ff=4 * width, num_layers=2, num_heads=width // HEAD, vocab_size=TOKENS,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5EncoderModel(config)


def vit(width: int) -> nn.Module:
    sizes = {**_sizes(width), "intermediate_size": 4 * width, "image_size": 16, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def distilbert(width: int) -> nn.Module:
    config = transformers.DistilBertConfig(
        dim=width, hidden_dim=4 * width, n_layers=2, n_heads=width // HEAD, vocab_size=TOKENS,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def _timm(name: str, **options: object) -> nn.Module:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    return timm.create_model(name, num_classes=3, **options)


def timm_resnet(width: int) -> nn.Module:
    # a deep stem gives twice its width, so that the first stage has no projection at any width
    channels = tuple(width * 2**stage for stage in range(4))
    return _timm("resnet18", channels=channels, stem_type="deep", stem_width=width // 2)


def timm_vit(width: int) -> nn.Module:
    sizes = {"embed_dim": width, "num_heads": width // HEAD, "depth": 2, "img_size": 16, "patch_size": 4}
    return _timm("vit_tiny_patch16_224", **sizes)


def timm_mixer(width: int) -> nn.Module:
    mixer = pytest.importorskip("timm.models.mlp_mixer", exc_type=ImportError)
    return mixer.MlpMixer(num_classes=3, img_size=16, patch_size=4, num_blocks=2, embed_dim=width)


def timm_convnext(width: int) -> nn.Module:
    return _timm("convnext_atto", dims=tuple(width * 2**stage for stage in range(4)), depths=(1, 1, 1, 1))


def timm_convnext_v2(width: int) -> nn.Module:
    return _timm("convnextv2_atto", dims=tuple(width * 2**stage for stage in range(4)), depths=(1, 1, 1, 1))


def timm_efficientnet(width: int) -> nn.Module:
    """Three stages of EfficientNet, by its own builder."""
    efficientnet = pytest.importorskip("timm.models.efficientnet", exc_type=ImportError)
    stages = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r2_k3_s2_e6_c24_se0.25"], ["ir_r1_k5_s2_e6_c40_se0.25"]]
    rounded = partial(efficientnet.round_channels, multiplier=width / 16, divisor=4)
    blocks = efficientnet.decode_arch_def(stages)
    return efficientnet.EfficientNet(blocks, 3, num_features=rounded(64), stem_size=16, round_chs_fn=rounded)


LANGUAGE = [untied_gpt2, bert, llama, mistral, qwen2, gemma, t5, distilbert]
IMAGES = [vit, timm_resnet, timm_vit, timm_mixer, timm_convnext, timm_convnext_v2, timm_efficientnet]

MODELS = {make.__name__: make for make in (*LANGUAGE, *IMAGES)}
# what no known module owns, or what a library's own layer holds: its role
ROLES = {
    "untied_gpt2": {"transformer.wpe.weight": "input", "transformer.h.0.attn.c_attn.weight": "hidden"},
    "bert": {"bert.embeddings.LayerNorm.weight": "vector", "classifier.weight": "output"},
    "llama": {"model.norm.weight": "vector", "model.layers.0.self_attn.k_proj.weight": "hidden"},
    "mistral": {"model.layers.1.post_attention_layernorm.weight": "vector", "lm_head.weight": "output"},
    "qwen2": {"model.norm.weight": "vector", "model.layers.0.self_attn.v_proj.bias": "vector"},
    "gemma": {"model.norm.weight": "vector", "model.embed_tokens.weight": "input"},
    "t5": {"encoder.final_layer_norm.weight": "vector"},
    "distilbert": {"distilbert.embeddings.position_embeddings.weight": "input"},
    "vit": {"vit.embeddings.cls_token": "vector", "vit.embeddings.position_embeddings": "input"},
    "timm_resnet": {"conv1.0.weight": "input", "layer2.0.downsample.0.weight": "hidden", "fc.weight": "output"},
    "timm_vit": {"cls_token": "vector", "pos_embed": "input", "patch_embed.proj.weight": "input"},
    "timm_mixer": {"blocks.0.mlp_tokens.fc1.weight": "input", "blocks.0.mlp_tokens.fc2.weight": "output"},
    "timm_convnext": {"stages.0.blocks.0.gamma": "vector", "stages.0.blocks.0.conv_dw.weight": "input"},
    "timm_convnext_v2": {"stages.0.blocks.0.mlp.grn.weight": "vector"},
    "timm_efficientnet": {"blocks.1.0.conv_dw.weight": "input", "blocks.1.0.se.conv_reduce.weight": "hidden"},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("error::UserWarning:mukron")
@pytest.mark.parametrize("name", MODELS)
def test_models_need_no_roles(name):
    make = MODELS[name]
    shapes = base_shapes(make, width=16)
    for width in (32, 64):
        plan = parametrize(make(width), shapes)
        assert {parameter: plan.parameters[parameter].role.value for parameter in ROLES[name]} == ROLES[name]
        for parameter in plan.parameters.values():
            growing = [here for here, there in zip(parameter.shape, parameter.base_shape, strict=True) if here != there]
            assert {parameter.growth.r_in, parameter.growth.r_out} <= {1, width // 16}
            assert (parameter.role is Role.SCALAR) == (not growing)
            assert (parameter.role is Role.HIDDEN) == (len(growing) == 2)


def _logits(returned) -> torch.Tensor:
    if isinstance(returned, torch.Tensor):
        return returned
    return returned.logits if hasattr(returned, "logits") else returned.last_hidden_state


OPTIMIZERS: dict[str, Callable[[nn.Module, mukron.Parametrization], torch.optim.Optimizer]] = {
    "adamw": lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=0.01)),
    "kfac": lambda model, plan: mukron.KFAC(model, plan, lr=0.01, class_dim=-1, output=_logits),
    "foof": lambda model, plan: mukron.FOOF(model, plan, lr=0.01, class_dim=-1, output=_logits),
    "shampoo": lambda model, plan: mukron.Shampoo(model, plan, lr=0.01),
    "soap": lambda model, plan: mukron.SOAP(model, plan, lr=0.01),
    "muon": lambda model, plan: mukron.Muon(model, plan, lr=0.01),
}


def _output(model: nn.Module, make: Callable[[int], nn.Module]) -> torch.Tensor:
    torch.manual_seed(1)
    inputs = torch.randint(TOKENS, (4, 12)) if make in LANGUAGE or make is gpt2 else torch.randn(4, 3, 16, 16)
    if make in (timm_resnet, timm_convnext, timm_convnext_v2):
        inputs = F.interpolate(inputs, size=64)
    return _logits(model(inputs))


@pytest.mark.filterwarnings(
    "ignore:output layer .* starts at .nearly. zero", "ignore:the curvature of .* is negligible"
)
@pytest.mark.parametrize("method", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_models_take_steps(name, method):
    make = MODELS[name]
    model = make(32)
    model.train()
    optimizer = OPTIMIZERS[method](model, parametrize(model, base_shapes(make, width=16)))
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        output = _output(model, make)
        F.cross_entropy(output.flatten(0, -2), torch.randint(output.shape[-1], output.shape[:-1]).flatten()).backward()
        optimizer.step()
    used = [key for key, value in model.named_parameters() if value.grad is not None]
    moved = [key for key in used if not torch.equal(before[key], model.get_parameter(key))]
    assert len(moved) > 0.9 * len(used)
    assert all(bool(value.isfinite().all()) for value in model.parameters())
    if method in ("kfac", "foof", "shampoo", "soap", "muon") and name == "untied_gpt2":
        assert {f"transformer.h.{i}.{layer}" for i in (0, 1) for layer in GPT2_LAYERS} <= {*optimizer.layers}
    if isinstance(optimizer, mukron.KFAC) and name in ("timm_convnext", "timm_efficientnet"):
        assert "depthwise convolutions are among these" in str(optimizer.plan())


GPT2_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@pytest.mark.parametrize("make", [gpt2, partial(llama, tied=True)], ids=["gpt2", "llama"])
def test_the_remedy_of_a_tied_head_can_be_pasted(make):
    """The role and the hook that the error proposes: logits move alike at both widths."""
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(make, width=16)
    text = str(caught.value)
    roles = eval(re.search(r"roles=(\{.*?\})", text)[1])
    hook = re.search(r"model\.get_submodule.*\)\)$", text)[0]

    def scaled(width):
        model = make(width)
        exec(hook, {"model": model, "base_width": 16, "width": width})
        return model

    def move(width):
        torch.manual_seed(0)
        model = scaled(width).eval()
        plan = parametrize(model, base_shapes(scaled, width=16, roles=roles))
        optimizer = torch.optim.AdamW(plan.param_groups("adamw", lr=0.01))
        before = _output(model, gpt2)
        F.cross_entropy(before.flatten(0, 1), torch.randint(TOKENS, before.shape[:2]).flatten()).backward()
        optimizer.step()
        return float((_output(model, gpt2) - before).detach().std())

    assert 0.5 < move(128) / move(16) < 2
