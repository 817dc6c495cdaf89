"""The config of a run: its schema, and the way from a YAML file and overrides to it."""

from recjax.config.experience import (
    ExperienceConfig,
    LateConfig,
    MissingLogprobs,
    MixConfig,
    Priority,
    RefillConfig,
    RegimeConfig,
    ReplayConfig,
    RolloutConfig,
)
from recjax.config.load import load_config, make_config, stored_values, to_yaml, unknown_keys
from recjax.config.model import (
    Attention,
    DecoderShape,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    Projection,
    Remat,
    WarmStartConfig,
)
from recjax.config.schema import (
    KEYS,
    MAY_CHANGE,
    SHORT_NAMES,
    AlgorithmConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    SamplesConfig,
    TrackingConfig,
    TrainingConfig,
    resumable_keys,
)
from recjax.config.tasks import (
    PASSED,
    PYTHON,
    TASKS,
    ArithmeticTask,
    FileTask,
    GradingConfig,
    Gsm8kTask,
    GuruMathTask,
    MathTask,
    MixedTask,
    OneTask,
    ReasoningGymTask,
    TaskConfig,
    ToolAceTask,
)
