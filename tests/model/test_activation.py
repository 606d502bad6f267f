"""Activations under the frame rule: an element's bits do not depend on the number of rows."""

import pytest
import torch
from transformers.activations import ACT2FN

from samewise.model.activation import FrameActivation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "tanh", "sigmoid", "relu2"]
)
@pytest.mark.parametrize("width", [1, 8, 40, 64, 107, 112, 1536, 40000])
def test_a_frame_activation_has_the_same_bits_at_any_number_of_rows(
    name: str, width: int, dtype: torch.dtype
) -> None:
    activation = FrameActivation(ACT2FN[name])
    wide = torch.randn(1, 33, 3 * width, generator=torch.Generator().manual_seed(3)).mul_(3).to(dtype)
    x = wide[..., width : 2 * width]  # strided, like a slice of a wider product
    expected = activation(x)
    torch.testing.assert_close(expected, ACT2FN[name](x))
    for rows in (1, 2, 5, 22, 33):
        for start in (0, 33 - rows):
            part = slice(start, start + rows)
            assert torch.equal(activation(x[:, part]), expected[:, part])
            assert torch.equal(activation(x[:, part].contiguous()), expected[:, part])
