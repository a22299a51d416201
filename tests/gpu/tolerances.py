"""How far a kernel may be from the reference: one table by dtype, used by every GPU test."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Limits on a result.

    Attributes:
        absolute: Largest error of an element, for inputs of unit scale.
        relative: Norm of the error over the norm of the result.
    """

    absolute: float
    relative: float


# Attention: 16-bit weights times 16-bit values, summed in fp32, rounded to 16 bits.
ATTENTION = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.float16: Tolerance(2.5e-3, 1e-3),
    torch.bfloat16: Tolerance(2e-2, 6e-3),
}

# Natural-log LSE of fp32 sums of 16-bit products.
LSE = 1e-3

# Ops that compute in fp32 and round once: one unit in the last place of the dtype, relative to the element.
ELEMENTWISE = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
