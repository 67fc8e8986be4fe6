"""How does a user's own class become a policy? `module:Class` is imported, checked and built; what is wrong is said in one line."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from discovery.config import ConfigError
from router.scheduling.types import Policy


class PolicyNotLoaded(ConfigError):
    """The name does not lead to a policy; the message says at which step."""


def load_class(path: str) -> Policy:
    """An instance of the class at `module:Class`, built without arguments; the current directory is searched last.

    Raises PolicyNotLoaded.
    """
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise PolicyNotLoaded(f"policy {path!r}: expected module:Class")
    module = _import(path, module_name)
    found: object = module
    for part in class_name.split("."):
        found = getattr(found, part, None)
        if found is None:
            where = getattr(module, "__file__", None) or "a namespace package"
            raise PolicyNotLoaded(f"policy {path!r}: module {module_name!r} ({where}) has no {class_name!r}")
    if not inspect.isclass(found):
        raise PolicyNotLoaded(f"policy {path!r}: {class_name!r} is not a class")
    return _build(path, found)


def _import(path: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # Last, so that a file here never takes the place of an installed module.
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise PolicyNotLoaded(f"policy {path!r}: no module {error.name!r}, neither installed nor in {here}") from error
        raise PolicyNotLoaded(f"policy {path!r}: importing {name!r} failed: it needs the module {error.name!r}") from error
    except Exception as error:
        raise PolicyNotLoaded(f"policy {path!r}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _build(path: str, policy_class: type) -> Policy:
    score = getattr(policy_class, "score", None)
    if not callable(score):
        raise PolicyNotLoaded(f"policy {path!r}: the class has no method score(request, candidates, context)")
    if inspect.iscoroutinefunction(score) or inspect.isasyncgenfunction(score):
        raise PolicyNotLoaded(f"policy {path!r}: score is async; choosing never waits, so it must be a plain method")
    try:
        policy = policy_class()
    except Exception as error:
        raise PolicyNotLoaded(f"policy {path!r}: {policy_class.__name__}() failed: {type(error).__name__}: {error}") from error
    try:
        inspect.signature(policy.score).bind("request", "candidates", "context")
    except TypeError as error:
        raise PolicyNotLoaded(f"policy {path!r}: score cannot be called as score(request, candidates, context): {error}") from error
    except ValueError:
        pass  # a callable without a readable signature: the first request will tell
    return cast("Policy", policy)
