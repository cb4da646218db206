"""Names: of the whole model's tree, whatever a part of it holds, and of what comes later."""

from __future__ import annotations

import numpy as np

from minitrain.nn import GPT, GPTConfig, Linear, Module, normal

CONFIG = GPTConfig(vocab=7, context=4, layers=2, heads=2, width=8)


class Twice(Module):
    """A module of one's own."""

    def __init__(self) -> None:
        self.inner = Linear((8,), (8,), normal(0.1))
        self.outer = Linear((8,), (8,), normal(0.1))


def test_what_is_put_in_place_of_another_module_is_named_after_its_place() -> None:
    model = GPT(CONFIG)
    model.replace("blocks.1.mlp", Twice())
    names = [name for name in model.parameters() if name.startswith("blocks.1.mlp.")]
    assert names == [
        f"blocks.1.mlp.{part}.{kind}" for part in ("inner", "outer") for kind in ("weight", "bias")
    ]
    assert [model.parameters()[name].name for name in names] == names
    first, second = (model.parameters()[name].initial(0) for name in names[::2])
    assert not np.array_equal(first, second)  # drawn from streams of their own
    assert dict(model.modules())["blocks.1.mlp.inner"].path == "blocks.1.mlp.inner"


def test_a_part_of_a_model_has_the_names_of_the_whole() -> None:
    whole, last = GPT(CONFIG).parameters(), GPT(CONFIG, links=[2, 3]).parameters()
    assert last.keys() == {
        name for name in whole if name.startswith(("blocks.1.", "norm.", "embedding.token."))
    }  # the tied head goes by the table's name
    for name, parameter in last.items():
        assert parameter.declared == whole[name].declared
        np.testing.assert_array_equal(parameter.initial(3), whole[name].initial(3))
