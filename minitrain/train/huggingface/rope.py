"""What a config.json says of rotary positions."""

from __future__ import annotations

from typing import Any

from minitrain.train.huggingface.keys import FamilyError, check, check_known

# `type` is an older name of rope_type.
_ROPE_FIXED: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1.0, None),
    "partial_rotary_factor": (1.0, None),
}
_STRETCH = (*("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),)


def rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of rotary positions: in a part of its own since version 5, before
    that among the others and in rope_scaling."""
    older = ("rope_theta", "partial_rotary_factor")
    found = {name: theirs[name] for name in older if name in theirs}
    check(found, _ROPE_FIXED)
    for name in ("rope_scaling", "rope_parameters"):
        part = theirs.get(name) or {}
        if not isinstance(part, dict):
            raise FamilyError(f"config.json has {name} = {part!r}, not names and values")
        stretched = "llama3" in (part.get("rope_type"), part.get("type"))
        fixed = {} if stretched else _ROPE_FIXED
        check(part, fixed, f"{name}.")
        known = ["rope_theta", *_ROPE_FIXED, *(_STRETCH if stretched else ())]
        check_known(part, known, f"{name}.")
        found |= part
    return found


def stretch(rope: dict[str, Any]) -> tuple[float, float, float, float] | None:
    """Llama 3.1's change of frequencies, if there is one."""
    if "llama3" not in (rope.get("rope_type"), rope.get("type")):
        return None
    factor, low, high, context = (float(rope[name]) for name in _STRETCH)
    return factor, low, high, context


def stretch_to(stretch: tuple[float, ...] | None) -> dict[str, Any]:
    """The keys that say so; none where there is nothing to say."""
    if stretch is None:
        return {}
    return {"rope_scaling": {"rope_type": "llama3", **dict(zip(_STRETCH, stretch, strict=True))}}
