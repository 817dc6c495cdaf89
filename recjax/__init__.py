"""recjax: off-policy reinforcement learning of language models in JAX (arXiv 2509.24203)."""

__version__ = "0.1.0"
