"""Linear maps inside of modules are heard of by the thread and for the time that they should be."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.nn import functional as F

from mukron.curvature import Watch, hosts
from mukron.layers import Projection, layer_of


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, torch.Size]] = []

    def hear(self, watch, x, weight, output) -> None:
        self.heard.append((watch.name_of(weight), watch.samples_first(output).shape))


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(8, 2)


def watch_of(module: nn.Module, listener: Listener) -> Watch:
    layers = {name: product.layer for name, product in layer_of(module).products().items()}
    layers["out_proj"] = layer_of(module.out_proj)
    (host,) = hosts(module, {name: (name, layer) for name, layer in layers.items()})
    return host.watch(listener.hear)


def test_what_is_heard():
    """Samples come first, also where the output projection has folded them behind the positions."""
    module, listener, linear = attention(), Listener(), F.linear
    watch = watch_of(module, listener)
    query, key = torch.randn(5, 3, 8), torch.randn(4, 3, 8)
    watch.begin()
    module(query, key, key)
    F.linear(query, torch.randn(2, 8))
    watch.end()
    watch.end()  # once is enough
    module(query, query, query)
    assert [(name, tuple(shape)) for name, shape in listener.heard] == [
        ("in_proj_weight", (3, 5, 8)),
        ("in_proj_weight", (3, 4, 16)),
        ("out_proj", (3, 5, 8)),
    ]
    assert F.linear is linear


def test_threads_do_not_hear_each_other():
    module, linear = attention(), F.linear
    listeners = Listener(), Listener()
    begun, heard, ended = threading.Event(), threading.Event(), threading.Event()
    x = torch.randn(5, 3, 8)

    def other():
        watch = watch_of(module, listeners[1])
        begun.wait()
        watch.begin()
        heard.set()
        ended.wait()  # the first watch is over, this one is not
        module(x, x, x)
        watch.end()

    thread = threading.Thread(target=other)
    thread.start()
    watch = watch_of(module, listeners[0])
    watch.begin()
    begun.set()
    heard.wait()
    module(x, x, x)
    watch.end()
    assert F.linear is not linear
    ended.set()
    thread.join()
    assert F.linear is linear
    assert [len(listener.heard) for listener in listeners] == [2, 2]


def test_a_listener_that_is_gone_hears_nothing():
    module, listener = attention(), Listener()
    watch = watch_of(module, listener)
    watch.begin()
    del listener
    x = torch.randn(5, 3, 8)
    module(x, x, x)
    watch.end()


def test_somebody_who_replaces_the_function_later_is_left_alone():
    module, listener, linear = attention(), Listener(), F.linear
    watch = watch_of(module, listener)
    watch.begin()
    ours = F.linear

    def theirs(*arguments):
        return ours(*arguments)

    F.linear = theirs
    try:
        watch.end()
        assert F.linear is theirs
        x = torch.randn(5, 3, 8)
        assert module(x, x, x)[0].shape == x.shape
        again = watch_of(module, listener)
        again.begin()
        module(x, x, x)
        again.end()
        assert len(listener.heard) == 2
        assert F.linear is theirs
    finally:
        F.linear = linear
    again.begin()
    module(x, x, x)
    again.end()
    assert len(listener.heard) == 4
    assert F.linear is linear


def test_modules_without_such_layers_are_no_hosts():
    model = nn.Sequential(nn.Linear(3, 2), attention())
    assert list(hosts(model, {"0": ("0", layer_of(model[0]))})) == []
    layer = Projection(model[1], (24, 8), (False, True, False))
    (host,) = hosts(model, {"1.in_proj_weight": ("1.in_proj_weight", layer)})
    assert (host.name, dict(host.layers)) == ("1", {"in_proj_weight": "1.in_proj_weight", "out_proj.weight": ""})
