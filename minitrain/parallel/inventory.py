"""What a declared model is made of: its modules, as the table of placements wants to know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minitrain.layout import LayoutError
from minitrain.nn import AttentionCore, Dropout, Parameter
from minitrain.nn.shapes import ModuleShape
from minitrain.parallel.cuts import CUTS, EXPERTS, kind_of


def modules_of(model: Any) -> Iterator[ModuleShape]:
    """The modules of a declared model that hold parameters; the parts of one that is cut come with
    it."""
    cut_paths: list[str] = []
    for path, module in model.modules():
        if any(path.startswith(f"{outer}.") for outer in cut_paths):
            continue
        kind = kind_of(type(module)) or type(module).__qualname__
        if parts := kind in CUTS or kind in EXPERTS:
            cut_paths.append(path)
        found = {
            f"{inner}.{part}".lstrip("."): child
            for inner, each in (module.modules() if parts else [("", module)])
            for part, child in each.children()
            if isinstance(child, Parameter)
        }
        if found:
            shapes = {part: parameter.declared for part, parameter in found.items()}
            names = {part: parameter.name for part, parameter in found.items()}
            still = [part for part, parameter in found.items() if not parameter.trained]
            yield ModuleShape(_link(path, model), path, kind, shapes, names, still)


def _link(path: str, model: Any) -> int:
    """Which link of the chain a module belongs to."""
    first, *rest = path.split(".")
    if first == "blocks":
        return int(rest[0]) + 1
    return 0 if first == "embedding" else len(model.blocks) + 1


def check_declared(model: Any) -> None:
    """Refuse modules of which nobody knows how they are cut; nothing has been changed before.

    Raises:
        LayoutError: the path and class of the first one, or of one that stands at two places.
    """
    cut_paths: list[str] = []
    core_dropouts: list[Any] = []
    paths: dict[int, str] = {}
    for path, module in model.modules():
        kind = kind_of(type(module))
        where = f"the module at {path}" if path else "the model"
        first = paths.setdefault(id(module), path)
        if first != path and any(kind_of(type(part)) in CUTS for _, part in module.modules()):
            raise LayoutError(
                f"{where} is the one at {first} again, and would be cut twice by tensor "
                "parallelism; give each place a module of its own, or take a layout without tp"
            )
        if kind is None:
            raise LayoutError(
                f"{where} is a {type(module).__qualname__}, of which no table says how tensor "
                "parallelism cuts it; declare its cuts with @minitrain.parallel.declared, or take "
                "a layout without tp"
            )
        if isinstance(module, AttentionCore):
            core_dropouts.append(module.dropout)
        inside = any(path.startswith(f"{outer}.") for outer in cut_paths)
        if inside and isinstance(module, Dropout) and module not in core_dropouts:
            raise LayoutError(
                f"{where} is a dropout between cut linears, where it does not know which features "
                "of the model it has; put it after the module, or take a layout without tp"
            )
        if any(cut.role == "column" for cut in CUTS.get(kind, ())):
            cut_paths.append(path)
