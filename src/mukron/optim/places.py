"""Which layers an optimizer preconditions: those whose passes are seen, or all matrices for methods of gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from mukron.layers import BIAS, WEIGHT, BlockedLayer, MatrixLayer, ParameterMatrix, PartedLayer, layer_of
from mukron.optim.options import StepOptions, rows_of
from mukron.params import Parametrization
from mukron.params.excluded import Excluded, check_excluded, covers
from mukron.params.inventory import clean_name, inventory, unwrap
from mukron.theory import Method, Role

TakenLayer = tuple[MatrixLayer, dict[str, str]]  # a layer, and the names of its parameters by block


def blocks_of(method: Method) -> tuple[str, ...]:
    """The blocks of a layer that a method preconditions."""
    return (WEIGHT,) if method.matrices_only else (WEIGHT, BIAS)


def places_of(
    model: nn.Module,
    owned: Collection[str],
    options: StepOptions,
    method: Method,
    plan: Parametrization | None = None,
    captures: bool = True,
) -> dict[str, TakenLayer]:
    """The layers to precondition, by name, each with the names of its parameters by block.

    captures: whether passes of layers are measured. A method that needs gradients alone also has matrices that no pass
    is seen of, and tied ones, once.
    """
    if method.gradients_alone and not captures:
        return _matrices_of(model, owned, options, method, plan)
    return dict(_measured_layers(model, owned, options, method, plan))


def layers_in(module_name: str, module: nn.Module) -> Iterator[tuple[str, MatrixLayer, Mapping[str, str]]]:
    """A module's own layer and the linear maps that it applies by itself: names, layouts, and parameters by block."""
    name, layer = clean_name(module_name), layer_of(module)
    if isinstance(layer, MatrixLayer):
        yield name, layer, {block: full_name(name, block) for block in (WEIGHT, BIAS)}
    for local, product in layer.products().items():
        yield full_name(name, local), product.layer, {at: full_name(name, own) for at, own in product.blocks.items()}


def _measured_layers(
    model: nn.Module, owned: Collection[str], options: StepOptions, method: Method, plan: Parametrization | None
) -> Iterator[tuple[str, TakenLayer]]:
    """Layers with a layout that have an owned parameter and are not left to the fallback rule."""
    found, exclude = inventory(model), options.exclude
    outputs = _output_layers(model, plan) if method.matrices_only and exclude is None else ()
    named = [entry for module_name, module in unwrap(model).named_modules() for entry in layers_in(module_name, module)]
    _check_excluded(model, exclude, [full for name, _, of in named if name == of[WEIGHT] for full in of.values()])
    uses = {alias: list(entry.uses) for entry in found.values() for alias in entry.uses}
    first = {alias: name for name, entry in found.items() for alias in entry.uses}

    def transposed(full: str) -> bool:
        if plan is not None and full in first:
            return plan.parameters[first[full]].sums_transposed(method)
        return full in first and found[first[full]].ties_head and method.has_both_sides

    def shared(full: str) -> bool:
        return full in first and (found[first[full]].sums_uses or transposed(full))

    for name, layer, of_blocks in named:
        if (layer.one_hot and exclude is None) or name in outputs:
            continue
        taken = [block for block in blocks_of(method) if layer.preconditions(block)]
        names = {block: full for block in taken if (full := of_blocks.get(block, "")) in first}
        names = {
            block: full
            for block, full in names.items()
            if not any(_excluded(use, exclude or ()) for use in (full, *(uses.get(full, ()) if shared(full) else ())))
        }
        if shared(of_blocks[WEIGHT]):  # once, with what all its layers see; their biases take the fallback rule
            names = {at: first[full] for at, full in names.items() if at == WEIGHT}
            if name != _main_use([other for other in named if other[2][WEIGHT] in uses[of_blocks[WEIGHT]]]):
                continue
        elif options.leaves_tied and any(len(uses.get(full, ())) > 1 for full in names.values()):
            continue
        held = [full for full in names.values() if first.get(full) in owned]
        for full in held:
            if len(uses[full]) > 1 and not shared(full):
                tied = ", ".join(f'"{use}"' for use in uses[full])
                raise ValueError(
                    f"tied parameter {tied}: the curvature of one use is not that of the other. Leave it to the "
                    f'fallback rule, exclude=("{name}", ...) with every layer that uses it'
                )
        if plan is not None:  # its answer is what tables show, too
            names = {at: full for at, full in names.items() if not plan.falls_back(first[full], exclude, method)}
            held = [full for full in held if full in names.values()]
        if held:
            _refuse_empty(name, layer)
            yield name, (layer, names)


def _main_use(uses: Sequence[tuple[str, MatrixLayer, Mapping[str, str]]]) -> str:
    """The layer whose layout a shared weight has: the first one that uses it, of an embedding and a head the former."""
    return next((name for name, layer, _ in uses if layer.one_hot), uses[0][0])


def other_uses(model: nn.Module, places: Mapping[str, TakenLayer]) -> dict[str, dict[str, MatrixLayer]]:
    """By layer, the other layers that use its weight, by name."""
    named = {
        of_blocks[WEIGHT]: (name, layer)
        for module_name, module in unwrap(model).named_modules()
        for name, layer, of_blocks in layers_in(module_name, module)
    }
    found = inventory(model)
    others = {}
    for name, (_, of_blocks) in places.items():
        full = of_blocks.get(WEIGHT, "")
        if full in found and (found[full].sums_uses or found[full].ties_head):
            others[name] = {other: layer for other, layer in map(named.__getitem__, found[full].uses) if other != name}
    return others


def _matrices_of(
    model: nn.Module, owned: Collection[str], options: StepOptions, method: Method, plan: Parametrization | None
) -> dict[str, TakenLayer]:
    found, exclude = inventory(model), options.exclude
    outputs = _output_layers(model, plan) if method.matrices_only and exclude is None else ()
    _check_excluded(model, exclude, [alias for entry in found.values() for alias in entry.uses])

    def takes(full: str, module: str | None) -> bool:
        """Whether a parameter is taken; with a plan that is the plan's answer, which tables show too."""
        if full not in owned:
            return False  # a tied one has its first name
        if plan is not None:
            return not plan.falls_back(full, exclude, method)
        entry = found[full]
        left = entry.embedding if exclude is None else any(_excluded(use, exclude) for use in entry.uses)
        tied = entry.embedding and len(entry.uses) > 1  # one step cannot be that of an embedding and that of a matrix
        return not (left or tied or module in outputs) and (entry.preconditioned or entry.matrix)

    places: dict[str, TakenLayer] = {}
    for module_name, module in unwrap(model).named_modules():
        name, layer, known = clean_name(module_name), layer_of(module), set[str]()
        for layer_name, matrix_layer, of_blocks in layers_in(module_name, module):
            known |= {*of_blocks.values()}
            names = {block: of_blocks[block] for block in blocks_of(method) if block in of_blocks}
            names = {block: full for block, full in names.items() if takes(full, layer_name)}
            if names:
                _refuse_empty(layer_name, matrix_layer)
                places[layer_name] = _cut(matrix_layer, options, layer_name), names
        for local, parameter in module.named_parameters(recurse=False):
            full, shape = full_name(name, local), tuple(parameter.shape)
            bare = plan is not None and full in plan.parameters and plan.parameters[full].matrix
            parts = layer.stacked(local, shape) or int(bare)
            if full not in known and parts and min(shape) and takes(full, None):
                places[full] = _cut(ParameterMatrix(module, shape, parts), options, full), {WEIGHT: full}
    for key in options.split:
        if not any(_is_named(name, key) for name in places):
            listed = ", ".join(places)
            raise ValueError(f'split: no layer that is preconditioned is called "{key}"; there are: {listed}')
    return places


def _cut(layer: MatrixLayer, options: StepOptions, name: str) -> MatrixLayer:
    """A layer in the parts that it stacks, and in blocks."""
    key = max((key for key in options.split if _is_named(name, key)), key=len, default=None)  # the most specific name
    asked = 1 if key is None else options.split[key]
    rows = rows_of(asked)
    if rows is not None and layer.d_out % rows:
        raise ValueError(f'split: layer "{name}" has {layer.d_out} outputs, which are no parts of {rows} rows')
    parts = int(asked) if rows is None else layer.d_out // rows
    if (parts > 1 or rows) and (layer.one_hot or not layer.called):
        what = "an embedding" if layer.one_hot else f"taken as {layer.groups} matrices already"
        raise ValueError(f'split: "{name}" is {what}, and cannot be split')
    if layer.d_out % parts:
        raise ValueError(f'split: layer "{name}" has {layer.d_out} outputs, which are no {parts} equal parts')
    layer = PartedLayer(layer, parts, multiply=rows is not None) if parts > 1 or rows else layer
    blocked = options.block is not None and max(layer.d_out, layer.d_in) > options.block and not layer.one_hot
    return BlockedLayer(layer, options.block or 1) if blocked else layer


def _is_named(name: str, key: str) -> bool:
    """A layer by its whole name, or by the end of it."""
    return name == key or name.endswith(f".{key}")


def _check_excluded(model: nn.Module, exclude: Collection[Excluded] | None, parameters: Collection[str] = ()) -> None:
    own = unwrap(model)
    modules = [clean_name(name) for name, _ in own.named_modules()]
    check_excluded(exclude, modules, parameters, [clean_name(name) for name, _ in own.named_parameters()])


def _refuse_empty(name: str, layer: MatrixLayer) -> None:
    if not min(layer.d_in, layer.d_out):
        raise ValueError(
            f'layer "{name}" is empty, {layer.d_out} x {layer.d_in}; remove it, or leave it to the fallback rule: '
            f'exclude=("{name}",)'
        )


def _output_layers(model: nn.Module, plan: Parametrization | None) -> Collection[str]:
    """Layers from a growing to a fixed side; without a plan the last layer of the model, in its own order."""
    if plan is not None:
        return {name.rpartition(".")[0] for name, parameter in plan.parameters.items() if parameter.role is Role.OUTPUT}
    known = [clean_name(name) for name, module in unwrap(model).named_modules() if _is_matrix(module)]
    return known[-1:]


def _is_matrix(module: nn.Module) -> bool:
    layer = layer_of(module)
    return isinstance(layer, MatrixLayer) and not layer.one_hot


def full_name(layer: str, block: str) -> str:
    return f"{layer}.{block}" if layer else block


def _excluded(name: str, exclude: Collection[Excluded]) -> bool:
    """A layer by its own name, or by that of a module it is in."""
    return any(covers(entry, name) for entry in exclude)
