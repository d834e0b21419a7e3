"""hetero_fw: declarative training on clusters of unequal accelerators."""

__version__ = "0.1.0"
