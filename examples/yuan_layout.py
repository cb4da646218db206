"""Yuan 1.0's layout, 2128 ranks on this machine: tp8 × pp38 × dp7, 76 layers (Wu et al. 2021).

One step on 2128 thread ranks: 38 stages of two layers, eight ranks to a layer, seven replicas. Each
rank's pieces of the gradient and of the stepped weights are held against one device. Some minutes
on two cores; a smaller layout, such as dp2,pp4,tp2, takes seconds:

    python examples/yuan_layout.py [LAYOUT]
"""

from __future__ import annotations

import resource
import sys
import time

import minitrain as mt
from minitrain.comm import Group
from minitrain.nn import GPTConfig
from minitrain.optim import SGD
from minitrain.oracle.reference import Trace, awkward_batches, train_serially
from minitrain.train.step import Stepper

CONFIG = GPTConfig(vocab=64, context=8, layers=76, heads=8, width=16)
BATCHES = awkward_batches(CONFIG.vocab, CONFIG.context, size=14, steps=1, seed=0)
MICRO_BATCHES, SEED, RATE, CLIP = 2, 0, 0.1, 1.0


def error(got: object, expected: object, size: float) -> float:
    """The largest difference between two arrays, as a share of a size."""
    difference = abs(got - expected)  # type: ignore[operator]
    return float(difference.max(initial=0.0)) / size if size else 0.0


def step(group: Group, layout: mt.Layout, reference: Trace) -> float:
    """One step as one rank: the largest error of anything that it holds."""
    model = mt.parallelize(CONFIG, mt.Mesh(group, layout), micro_batches=MICRO_BATCHES, seed=SEED,
                           dtype="float64")  # fmt: skip
    result = Stepper(model, SGD(), lambda update: RATE, CLIP).step(BATCHES[0])
    errors = [abs(result.loss / reference.losses[0] - 1),
              abs(result.grad_norm / reference.norms[0] - 1)]  # fmt: skip
    at = model.mesh.coordinates
    for name, whole in reference.gradients[0].items():
        entry, size = model.table[name], float(abs(whole).max())
        if name in model.stepped.spans:
            mine = entry.stepped.cut(whole, at)
            # The bias of keys has no gradient but rounding: measured by the norm, as by itself.
            errors.append(error(model.stepped.grad(name), mine, max(size, reference.norms[0])))
        if name in model.lives.spans:
            weight = reference.weights[0][name]
            errors.append(error(model.parameters[name].array, entry.placement.cut(weight, at), 1.0))
    return max(errors)


def main() -> None:
    layout = mt.Layout.parse((sys.argv[1:] or ["dp7,pp38,tp8"])[0])
    plain = mt.nn.GPT(CONFIG).initialize(SEED, "float64")
    reference = train_serially(plain, BATCHES, SGD(), lambda update: RATE, clip=CLIP,
                               micro_batches=MICRO_BATCHES, seed=SEED)  # fmt: skip
    start = time.monotonic()
    errors = mt.run_ranks(layout.size, step, layout, reference)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{layout}: {layout.size} ranks, {CONFIG.layers} layers")
    print(f"a step in {time.monotonic() - start:.0f} s, at most {peak:.2f} GiB in use")
    print(f"largest error of any piece on any rank: {max(errors):.1e}")


if __name__ == "__main__":
    main()
