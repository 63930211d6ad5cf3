"""AutoAugment's policy for CIFAR-10 (Cubuk et al., CVPR 2019) on a batch. A sub-policy is drawn for each image.

A sub-policy is two operations, each with a probability and a strength, which is a level from 0 to 9. The levels span
the ranges of the AutoAugment paper: shear 0.3, translation 150 of 331 pixels, rotation 30 degrees, 1 +- 0.9 for colour,
contrast, brightness and sharpness, posterize 8 to 4 bits, solarize from 1 down to 0. Directions and signs are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# fmt: off
POLICY = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)), (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)), (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)), (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("colour", 0.4, 3), ("brightness", 0.6, 7)), (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)), (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("colour", 0.7, 7), ("translate_x", 0.5, 8)), (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)), (("brightness", 0.9, 6), ("colour", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)), (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)), (("colour", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)), (("brightness", 0.1, 3), ("colour", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)), (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)), (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
)
# fmt: on


def autoaugment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment images [n, channels, height, width] in [0, 1] with one or three channels."""
    n = len(images)
    policy = torch.randint(len(POLICY), (n,), generator=generator).tolist()
    chance = torch.rand(n, 2, generator=generator).tolist()
    sign = (2 * torch.randint(2, (n, 2), generator=generator) - 1).tolist()
    images = images.clone()
    for turn in (0, 1):
        chosen: dict[str, list[tuple[int, float]]] = {}  # by operation: images and strengths
        for number in range(n):
            name, probability, level = POLICY[policy[number]][turn]
            if chance[number][turn] < probability:
                chosen.setdefault(name, []).append((number, sign[number][turn] * level / 9))
        for name, pairs in chosen.items():
            rows = torch.tensor([number for number, _ in pairs], device=images.device)
            strength = images.new_tensor([strength for _, strength in pairs])[:, None, None, None]
            images[rows] = OPERATIONS[name](images[rows], strength).clamp(0, 1)
    return images


def shear(x: Tensor, strength: Tensor, axis: int) -> Tensor:
    """Shift rows along x (axis 0) or columns along y (axis 1) by at most 0.3 of their distance from the corner."""
    matrix = _identity(x)
    matrix[:, axis, 1 - axis] = (0.3 * strength).flatten()
    return _affine(x, matrix)


def translate(x: Tensor, strength: Tensor, axis: int) -> Tensor:
    size = x.shape[-1 - axis]
    matrix = _identity(x)
    matrix[:, axis, 2] = (150 / 331 * size * strength).flatten().trunc()
    return _affine(x, matrix)


def rotate(x: Tensor, strength: Tensor) -> Tensor:
    """Rotate counter-clockwise about the middle of the image."""
    angle = (math.radians(30) * strength).flatten()
    middle = x.new_tensor([x.shape[-1] / 2, x.shape[-2] / 2])
    matrix = _identity(x)
    matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
    matrix[:, 0, 1], matrix[:, 1, 0] = -angle.sin(), angle.sin()
    matrix[:, :, 2] = middle - matrix[:, :, :2] @ middle
    return _affine(x, matrix)


def colour(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(_grey(x), x, strength)


def contrast(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(_grey(x).mean((1, 2, 3), keepdim=True), x, strength)


def brightness(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(torch.zeros_like(x), x, strength)


def sharpness(x: Tensor, strength: Tensor) -> Tensor:
    """Blend with a 3 x 3 smoothing, which does not change the border."""
    kernel = x.new_ones(3, 3)
    kernel[1, 1] = 5
    channels = x.shape[1]
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = torch.nn.functional.conv2d(
        x, (kernel / kernel.sum()).expand(channels, 1, 3, 3), groups=channels
    )
    return _blend(smooth, x, strength)


def posterize(x: Tensor, strength: Tensor) -> Tensor:
    """Keep fewer of the eight bits."""
    step = 2 ** (4 * strength.abs()).round()
    return (255 * x).round().div(step, rounding_mode="floor") * step / 255


def solarize(x: Tensor, strength: Tensor) -> Tensor:
    """Invert the pixels that are at least as bright as the threshold."""
    return torch.where(x < 1 - strength.abs(), x, 1 - x)


def autocontrast(x: Tensor, strength: Tensor) -> Tensor:
    """Stretch every channel to the range from 0 to 1; constant channels do not change."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low), x)


def equalize(x: Tensor, strength: Tensor) -> Tensor:
    """Spread the 256 levels of every channel so that each is used about as often; small images do not change."""
    levels = (255 * x).round().long().flatten(2)
    counts = levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels))
    highest = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - highest).div(255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    table = (below + step // 2).div(step.clamp_min(1), rounding_mode="floor").clamp_max(255)
    spread = table.gather(2, levels).to(x.dtype) / 255
    return torch.where(step > 0, spread, x.flatten(2)).view_as(x)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shear_y": lambda x, strength: shear(x, strength, 1),
    "translate_x": lambda x, strength: translate(x, strength, 0),
    "translate_y": lambda x, strength: translate(x, strength, 1),
    "rotate": rotate,
    "colour": colour,
    "contrast": contrast,
    "brightness": brightness,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": lambda x, strength: 1 - x,
}


def _blend(other: Tensor, x: Tensor, strength: Tensor) -> Tensor:
    """Blend an image with another: (1 + 0.9 strength) of the image, and the rest of the other."""
    return other + (1 + 0.9 * strength) * (x - other)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _identity(x: Tensor) -> Tensor:
    return torch.eye(2, 3, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)


def _affine(x: Tensor, matrix: Tensor) -> Tensor:
    """Take each pixel from the position matrix [n, 2, 3] times (x, y, 1), in pixels; black outside of the image."""
    height, width = x.shape[2:]
    rows, columns = torch.meshgrid(
        torch.arange(height, device=x.device) + 0.5, torch.arange(width, device=x.device) + 0.5, indexing="ij"
    )
    centres = torch.stack([columns, rows, torch.ones_like(rows)]).flatten(1).to(x.dtype)
    column, row = (matrix @ centres).floor().long().unbind(1)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1))[:, None].expand(-1, x.shape[1], -1)
    return (x.flatten(2).gather(2, source) * inside[:, None]).view_as(x)
