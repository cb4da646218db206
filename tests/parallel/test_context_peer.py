"""Attention over ranks against PyTorch's, in float64: output and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from cut_attention import attention

pytest.importorskip("torch", reason="PyTorch is the peer; pip install 'minitrain[peers]'")
import torch


@pytest.mark.parametrize("layout", ["cp4,ring", "cp4,zigzag", "cp4,ulysses2", "cp3,gather"])
@pytest.mark.parametrize("length", [7, 300])  # less than two for each piece; several tiles
def test_attention_over_ranks_equals_pytorchs(layout: str, length: int) -> None:
    rng = np.random.default_rng(0)
    q, grad_out = rng.normal(size=(2, 2, length, 4, 6))
    k, v = rng.normal(size=(2, 2, length, 2, 6))
    theirs = [torch.tensor(x.swapaxes(1, 2), requires_grad=True) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    out.backward(torch.tensor(grad_out.swapaxes(1, 2)))
    right = [out.detach(), *(x.grad for x in theirs)]
    for ours, peer in zip(attention(q, k, v, grad_out, layout), right, strict=True):
        np.testing.assert_allclose(ours.swapaxes(1, 2), peer.numpy(), rtol=0, atol=1e-12)
