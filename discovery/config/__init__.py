"""What is a command told to do? One loader for every command; see `loader` for the layers and `options` for the names."""

from discovery.config.errors import Complaint, ConfigError, nearest
from discovery.config.loader import Checked, Loaded, load
from discovery.config.options import Option, options
from discovery.config.render import help_text, in_force, reference
from discovery.config.specs import parse_engine_spec

__all__ = [
    "Checked",
    "Complaint",
    "ConfigError",
    "Loaded",
    "Option",
    "help_text",
    "in_force",
    "load",
    "nearest",
    "options",
    "parse_engine_spec",
    "reference",
]
