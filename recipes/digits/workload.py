"""What a sample costs the digits classifier, from its shape alone. Needs no torch."""

from __future__ import annotations

from itertools import pairwise

from hetero_fw.hardware import LayerProfile, WorkloadProfile

NUM_PIXELS = 64
NUM_CLASSES = 10
_BYTES = 4


def digits_workload(*, hidden_dim: int = 128, num_hidden_layers: int = 2) -> WorkloadProfile:
    """Profile of `DigitsModule` with the same arguments; FLOPs count matrix products."""
    widths = [NUM_PIXELS, *[hidden_dim] * num_hidden_layers, NUM_CLASSES]
    return WorkloadProfile(
        name="digits",
        layers=tuple(
            _linear(index, inputs, outputs)
            for index, (inputs, outputs) in enumerate(pairwise(widths))
        ),
    )


def _linear(index: int, num_inputs: int, num_outputs: int) -> LayerProfile:
    forward_flops = 2.0 * num_inputs * num_outputs
    # The first layer needs no gradient of its input.
    num_backward_products = 1 if index == 0 else 2
    return LayerProfile(
        name=f"layers.{index}",
        num_params=(num_inputs + 1) * num_outputs,
        forward_flops=forward_flops,
        backward_flops=num_backward_products * forward_flops,
        # Its input; what follows it keeps its output: ReLU as the next input, the loss itself.
        activation_bytes=_BYTES * (num_inputs + (num_outputs if num_outputs == NUM_CLASSES else 0)),
    )
