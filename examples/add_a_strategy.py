"""A strategy of one's own, proved: norms that live cut over tp and are gathered on use."""

import minitrain as mt
from minitrain.autograd import functional as F
from minitrain.cut import cut_sizes
from minitrain.oracle import NANO
from minitrain.parallel import regions
from minitrain.parallel.placement import cut
from minitrain.parallel.table import Entry


class GatheredNorm(mt.nn.Module):
    """A layer norm of which each rank keeps some of the gains and biases."""

    def __init__(self, norm, group):
        self.norm, self.group = norm, group

    def forward(self, x):
        sizes = cut_sizes(x.shape[-1], self.group.size)
        # Forward: all-gather. Backward: the own part, since each rank has the whole gradient.
        parameters = self.norm.weight, self.norm.bias
        gain, bias = (regions.gather(p, self.group, 0, sizes) for p in parameters)
        return F.layer_norm(x, gain, bias, self.norm.epsilon)


def shard_norms(model, table, mesh):
    """The placement says where pieces live; the rest of minitrain reads it there."""
    for path, norm in list(model.modules()):
        if isinstance(norm, mt.nn.LayerNorm):
            for parameter in (norm.weight, norm.bias):
                shape, placement, _ = table[parameter.name]
                placement = placement.with_place(cut("tp", 0, mesh.layout.tp))
                table[parameter.name] = Entry(shape, placement, placement)
            model.replace(path, GatheredNorm(norm, mesh["tp"]))


for layout in ("tp2", "tp3", "dp2,tp3"):  # all equal: errors near 1e-15, where 1e-12 is allowed
    report = mt.verify(NANO, layout, strategies=(shard_norms,))
    print(f"{layout:<8} {'equal' if report.ok else report.first}, error {report.worst.error:.1e}")
