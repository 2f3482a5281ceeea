"""What an operator sets of the front."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FrontConfig:
    """Settings of the HTTP side; the flags of ``fastlayers serve`` of the same names.

    Parameters
    ----------
    model_path : Path
        Folder of the model: its tokenizer, template and defaults.
    served_names : sequence of str
        Names that requests may use.
    api_keys, admin_keys : sequence of str
        Never shown; none: open, and admin routes off unless ``open_admin``.
    request_timeout, header_timeout, body_timeout, write_timeout : float
        Seconds; 0: none.
    server : dict
        The whole configuration as /server_info shows it, without secrets.
    """

    model_path: Path
    served_names: tuple[str, ...]
    root: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    open_admin: bool = False
    metrics_public: bool = False
    metrics_compat: str = "none"
    enable_openapi: bool = False
    cors_origins: tuple[str, ...] = ()
    max_n: int = 8
    max_logprobs: int = 20
    enable_priority: bool = False
    lenient_fields: bool = False
    chat_template: str | None = None
    generation_config: str = "auto"
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_field: str = "both"
    max_body_bytes: int = 16 * 2**20
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    request_timeout: float = 0.0
    watchdog_timeout: float = 30.0
    keep_alive: float = 15.0
    shutdown_timeout: float = 30.0
    drain_delay: float = 0.0
    log_prompts: bool = False
    freeze_gc: bool = True
    gc_warning: float = 0.0
    otlp_endpoint: str = ""
    server: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.served_names[0]
