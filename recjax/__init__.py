"""recjax: off-policy reinforcement learning of language models in JAX (arXiv 2509.24203)."""

import os
import sys

if dict(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)).get("-m", "").startswith("recjax."):
    from recjax.host_memory import prepare_host_memory

    prepare_host_memory()  # in commands, before JAX starts threads

# Without this, transformers reports at every start that torch is missing; recjax needs only its tokenizers and configs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
