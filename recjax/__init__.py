"""recjax: off-policy reinforcement learning of language models in JAX (arXiv 2509.24203)."""

import os

# transformers serves tokenizers and model configs here; without this it reports at every start that torch is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
