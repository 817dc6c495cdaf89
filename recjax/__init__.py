"""recjax: off-policy reinforcement learning of language models in JAX (arXiv 2509.24203)."""

import os

# Without this, transformers reports at every start that torch is missing; recjax needs only its tokenizers and configs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
