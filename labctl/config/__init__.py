"""lab.yaml, the user's config.yaml and the environment, as typed values.

Every public name is loaded at its first use, so that a command that needs only `paths` and
`read_lab_id` does not import the schema.

May import: model, errors, shell and the layers below.
"""

from typing import TYPE_CHECKING

from labctl.lazy import offer_names

if TYPE_CHECKING:
    from labctl.config.approval import (
        format_trust_command,
        is_trusted,
        list_trust_questions,
        trust,
    )
    from labctl.config.course import COURSE_FILE, load_course
    from labctl.config.course_schema import AssignmentConfig, CourseConfig
    from labctl.config.directories import (
        Paths,
        copy_environment,
        expand,
        expand_user,
        find_data_dir,
        find_home,
        find_paths,
        find_person_name,
        find_user_name,
        student_key,
    )
    from labctl.config.file_checks import check_files
    from labctl.config.identity import ensure_lab_id, read_lab_id
    from labctl.config.lab import find_lab, load_lab
    from labctl.config.layers import SWITCHES
    from labctl.config.reader import LAB_FILE
    from labctl.config.scalars import (
        clean_name,
        format_duration,
        format_size,
        gpu_text,
        parse_duration,
        parse_gpu,
        parse_line,
        parse_name,
        parse_port,
        parse_price,
        parse_size,
    )
    from labctl.config.schema import (
        DEFAULT_PROVIDER,
        DEFAULT_PYTHON,
        KNOWN_SERVICE_PORTS,
        ContainerLimits,
        DataSource,
        ImageConfig,
        LabConfig,
        ServerConfig,
        ServiceConfig,
    )
    from labctl.config.secrets import (
        list_secret_names,
        read_secret,
        read_secret_values,
        remove_secret,
        require_secret_names,
        set_secret,
    )
    from labctl.config.show import list_settings

_MODULES = {
    "approval": (
        "format_trust_command",
        "trust",
        "list_trust_questions",
        "is_trusted",
    ),
    "course": ("COURSE_FILE", "load_course"),
    "course_schema": ("AssignmentConfig", "CourseConfig"),
    "file_checks": ("check_files",),
    "identity": (
        "read_lab_id",
        "ensure_lab_id",
    ),
    "lab": ("find_lab", "load_lab"),
    "layers": ("SWITCHES",),
    "directories": (
        "Paths",
        "find_data_dir",
        "copy_environment",
        "expand",
        "expand_user",
        "find_home",
        "find_paths",
        "find_person_name",
        "find_user_name",
        "student_key",
    ),
    "reader": ("LAB_FILE",),
    "scalars": (
        "clean_name",
        "format_duration",
        "gpu_text",
        "parse_duration",
        "parse_gpu",
        "parse_line",
        "parse_name",
        "parse_port",
        "parse_price",
        "parse_size",
        "format_size",
    ),
    "schema": (
        "DEFAULT_PROVIDER",
        "DEFAULT_PYTHON",
        "DataSource",
        "ImageConfig",
        "KNOWN_SERVICE_PORTS",
        "LabConfig",
        "ContainerLimits",
        "ServerConfig",
        "ServiceConfig",
    ),
    "secrets": (
        "list_secret_names",
        "read_secret",
        "read_secret_values",
        "remove_secret",
        "require_secret_names",
        "set_secret",
    ),
    "show": ("list_settings",),
}

__all__ = [
    "COURSE_FILE",
    "DEFAULT_PROVIDER",
    "DEFAULT_PYTHON",
    "KNOWN_SERVICE_PORTS",
    "LAB_FILE",
    "SWITCHES",
    "AssignmentConfig",
    "ContainerLimits",
    "CourseConfig",
    "DataSource",
    "ImageConfig",
    "LabConfig",
    "Paths",
    "ServerConfig",
    "ServiceConfig",
    "check_files",
    "clean_name",
    "copy_environment",
    "ensure_lab_id",
    "expand",
    "expand_user",
    "find_data_dir",
    "find_home",
    "find_lab",
    "find_paths",
    "find_person_name",
    "find_user_name",
    "format_duration",
    "format_size",
    "format_trust_command",
    "gpu_text",
    "is_trusted",
    "list_secret_names",
    "list_settings",
    "list_trust_questions",
    "load_course",
    "load_lab",
    "parse_duration",
    "parse_gpu",
    "parse_line",
    "parse_name",
    "parse_port",
    "parse_price",
    "parse_size",
    "read_lab_id",
    "read_secret",
    "read_secret_values",
    "remove_secret",
    "require_secret_names",
    "set_secret",
    "student_key",
    "trust",
]

__getattr__ = offer_names(
    __name__, {name: module for module, names in _MODULES.items() for name in names}
)
