"""Which modules of a model are listened to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mukron.curvature.capture import Capture, Hook


def hooked(capture: Capture, hook: type[Hook]) -> list[Any]:
    """Put the hooks of a capture on its model; what they are removed by."""
    model, options = capture.model, capture.options
    handles = [model.register_forward_pre_hook(hook(capture, "before_forward", ""))]
    inside = {host.module for host in capture.hosts.values()}
    for name, host in capture.hosts.items() if options.measures else ():
        capture.modules[name] = host.module
        handles.append(host.module.register_forward_pre_hook(hook(capture, "before_host", name)))
        handles.append(host.module.register_forward_hook(hook(capture, "after_host", name), always_call=True))
    for name, (_, layer) in capture.uses.items():
        if layer.module in inside:
            continue
        if options.fused and layer.called:
            handles.append(layer.module.register_forward_pre_hook(hook(capture, "before_layer", name)))
        after = hook(capture, "after_layer", name)
        handles.append(layer.module.register_forward_hook(after, always_call=options.fused))
    handles.append(model.register_forward_hook(hook(capture, "after_forward", ""), always_call=True))
    return handles
