"""Ready-made models, data and workloads that the default configuration trains."""
