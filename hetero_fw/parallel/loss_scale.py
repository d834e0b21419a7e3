"""Dynamic loss scaling for fp16, decided from the global gradient norm.

`torch.amp.GradScaler` inspects local gradients only; under sharding each rank would have to agree
on overflow in a collective of its own. The global norm, which every step needs anyway, is not
finite exactly when some gradient is not, on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DynamicLossScale:
    """Halve on overflow, double after `growth_interval_steps` clean steps (GradScaler's rule).

    Attributes:
        scale: factor on the loss; 1.0 with growth off is "no scaling".
        clean_steps: steps since the scale last changed.
    """

    scale: float = 2.0**16
    growth_interval_steps: int = 2000
    clean_steps: int = 0
    is_dynamic: bool = True

    @classmethod
    def off(cls) -> DynamicLossScale:
        """The identity, for fp32 and bf16."""
        return cls(scale=1.0, is_dynamic=False)

    def update(self, *, is_finite: bool) -> None:
        """Account for one step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.scale = max(self.scale * 0.5, 1.0)
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps >= self.growth_interval_steps:
            self.scale *= 2.0
            self.clean_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self.clean_steps = int(state["clean_steps"])
