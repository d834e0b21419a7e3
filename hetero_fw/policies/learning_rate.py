"""Learning rate for a global batch that differs from the one it was tuned for."""

from __future__ import annotations

from hetero_fw.errors import ConfigError


def linear_scaled_lr(lr: float, global_batch_size: int, base_batch_size: int | None) -> float:
    """Scale `lr` by `global_batch_size / base_batch_size`; unchanged if there is no base.

    The linear rule of P. Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, 2.1.

    Raises:
        ConfigError: `base_batch_size` or `global_batch_size` is below 1.
    """
    if base_batch_size is None:
        return lr
    sizes = {
        "optim.base_batch_size": base_batch_size,
        "data.global_batch_size": global_batch_size,
    }
    ConfigError.collect(
        f"{key}={size} must be at least 1." for key, size in sizes.items() if size < 1
    )
    return lr * global_batch_size / base_batch_size
