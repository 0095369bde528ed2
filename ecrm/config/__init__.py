"""Configs: TOML in, a frozen and wholly checked `Config` out; no module imports torch or MPI."""

from ecrm.config.load import load_config, make_config, shipped_configs
from ecrm.config.reference import effective, reference
from ecrm.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
    ProtectionConfig,
    StorageConfig,
    TestingConfig,
    TrainConfig,
)

__all__ = [
    "ClusterConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "ProtectionConfig",
    "StorageConfig",
    "TestingConfig",
    "TrainConfig",
    "effective",
    "load_config",
    "make_config",
    "reference",
    "shipped_configs",
]
