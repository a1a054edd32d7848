"""lab.yaml, the user's config.yaml and the environment, as typed values."""

from labctl.config.files import check_files, known_lab_id, lab_id
from labctl.config.lab import SWITCHES, load_lab
from labctl.config.paths import Paths, data_dir, environment, expanded, paths
from labctl.config.reader import LAB_FILE
from labctl.config.scalars import (
    cleaned_name,
    duration_text,
    gpu_text,
    parse_duration,
    parse_gpu,
    parse_line,
    parse_name,
    parse_port,
    parse_price,
    parse_size,
    size_text,
)
from labctl.config.schema import (
    KNOWN_SERVICE_PORTS,
    DataSource,
    ImageConfig,
    LabConfig,
    Limits,
    ServerConfig,
    ServiceConfig,
)
from labctl.config.secrets import secret_names, secret_values, set_secret
from labctl.config.show import settings
from labctl.config.trust import trust, trust_questions, trusted

__all__ = [
    "KNOWN_SERVICE_PORTS",
    "LAB_FILE",
    "SWITCHES",
    "DataSource",
    "ImageConfig",
    "LabConfig",
    "Limits",
    "Paths",
    "ServerConfig",
    "ServiceConfig",
    "check_files",
    "cleaned_name",
    "data_dir",
    "duration_text",
    "environment",
    "expanded",
    "gpu_text",
    "known_lab_id",
    "lab_id",
    "load_lab",
    "parse_duration",
    "parse_gpu",
    "parse_line",
    "parse_name",
    "parse_port",
    "parse_price",
    "parse_size",
    "paths",
    "secret_names",
    "secret_values",
    "set_secret",
    "settings",
    "size_text",
    "trust",
    "trust_questions",
    "trusted",
]
