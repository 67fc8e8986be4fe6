"""The front door: which command was asked for? It reads the command line and hands over to one room.

Exit codes: 0 done, 1 something failed while running, 2 the command line or configuration cannot be used, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from discovery import logs
from discovery.config import ConfigError, help_text, in_force, load, nearest, options
from discovery.reasons import reasons
from discovery.redact import redact_text

if TYPE_CHECKING:
    from router.replay.settings import ReplaySettings

OTHERS_VARIABLES = frozenset({"COMMUTATOR_ENGINES_DIR"})
"""Begin with our prefix and are read by scripts/ and tests/, not by a command."""

logger = logging.getLogger("commutator")


class Command(msgspec.Struct, frozen=True):
    """A command, by the names of what it needs: nothing is imported for a command that is not run."""

    summary: str
    settings: str
    run: str


COMMANDS = {
    "serve": Command("route requests to engines by what is in their KV caches", "router.settings:ServeSettings", "router.app:serve"),
    "up": Command(
        "start engines on this machine and the router in front of them", "discovery.up.settings:UpSettings", "discovery.up.command:up"
    ),
    "relay": Command(
        "put engines' KV events on the bus for routers that cannot reach them", "discovery.settings:RelaySettings", "discovery.app:relay"
    ),
    "plan": Command("decide how many engines there should be, and make it so", "planner.settings:PlanSettings", "planner.app:plan"),
    "simulate": Command(
        "run engines that speak the real protocol and have no model",
        "engines.simulator.settings:SimulateSettings",
        "engines.simulator.serve:run",
    ),
    "doctor": Command(
        "say what is wrong with a live fleet, one line each, and how to mend it",
        "router.doctor.settings:DoctorSettings",
        "router.doctor.command:run",
    ),
    "top": Command("show a router's live page in a terminal", "router.top.settings:TopSettings", "router.top.command:run"),
    "replay": Command(
        "run traffic in virtual time against a simulated fleet, and compare policies",
        "router.replay.settings:ReplaySettings",
        "commutator:replay",
    ),
    "advise": Command(
        "say whether prefill/decode disaggregation pays for a model, prompt length and link",
        "planner.advise.settings:AdviseSettings",
        "planner.advise.command:run",
    ),
}


async def replay(settings: ReplaySettings) -> None:
    """Replay, with the planner where it is asked for: the one command of two rooms."""
    from router.replay.command import run as run_replay

    if not settings.planner:
        await run_replay(settings)
        return
    from planner.trial.replaying import Replaying, planned

    made: list[Replaying] = []

    def scaler() -> Replaying:
        made.append(planned(settings.engines, settings.prefill_engines, settings.ttft_target_s, settings.itl_target_ms, settings.startup_s))
        return made[-1]

    await run_replay(settings, scaler)
    for number, one in enumerate(made, 1):
        sys.stderr.write(f"planner, run {number}: {one.engine_s / 3600:.2f} engine-hours, {one.least} to {one.most} engines\n")


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what `argv` says; the exit code."""
    match argv:
        case ["--version", *_]:
            from importlib.metadata import version

            say(f"commutator {version('commutator')}")
            return 0
        case ["--help" | "-h" | "help", *_]:
            say(usage())
            return 0
        case [name, *rest] if name in COMMANDS:
            return run_command(name, rest, environ)
        case [name, *_] if not name.startswith("-"):
            complain(f"unknown command {name!r}{nearest(name, COMMANDS)}; see commutator --help")
        case [name, *_]:
            complain(f"a command comes before {name}: {', '.join(COMMANDS)}")
        case _:
            complain(f"a command is needed: {', '.join(COMMANDS)}; see commutator --help")
    return 2


def run_command(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Load the command's settings and run it to its end; the exit code."""
    settings = settings_of(name)
    if "--help" in argv or "-h" in argv:
        say(help_text(name, settings))
        return 0
    try:
        loaded = load(settings, argv=argv, environ=environ, read_file=read_file, known_variables=variables())
        if loaded.check_only:
            say(in_force(loaded))
            return 0
        logs.configure(getattr(loaded.settings, "log_level", "info"), getattr(loaded.settings, "log_format", "auto"), sys.stderr)
        run_until_done(named(COMMANDS[name].run), loaded.settings)
    except ConfigError as error:
        complain(str(error), name)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):  # the second when it was told twice: `router.running`
        return 130
    except Exception as error:  # the last place before a traceback: a user gets the reason in a line
        logger.debug("the command failed", exc_info=error)
        complain("\n".join(reasons(error)), name)
        return 1
    return 0


def run_until_done(command: Callable[[msgspec.Struct], Coroutine[object, object, None]], settings: msgspec.Struct) -> None:
    """Run a room's coroutine on uvloop."""
    import uvloop

    uvloop.run(command(settings))


def usage() -> str:
    """What `commutator --help` prints."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: commutator COMMAND [OPTIONS]", "", "commands:", *rows, "", "commutator COMMAND --help lists a command's options.", ""]
    )


def settings_of(name: str) -> type[msgspec.Struct]:
    """The settings Struct of a command."""
    settings = named(COMMANDS[name].settings)
    assert isinstance(settings, type) and issubclass(settings, msgspec.Struct)  # noqa: S101, PT018  the table above is right
    return settings


def variables() -> frozenset[str]:
    """Every variable that some command reads: an environment is shared, so one command's variables are no error to another."""
    return OTHERS_VARIABLES.union(*({option.variable for option in options(settings_of(name))} for name in COMMANDS))


def named(target: str) -> Callable[..., Coroutine[object, object, None]]:
    """What `module:attribute` names."""
    module, _, attribute = target.partition(":")
    found: Callable[..., Coroutine[object, object, None]] = getattr(importlib.import_module(module), attribute)
    return found


def read_file(path: str) -> str:
    """A configuration file's text."""
    return Path(path).read_text(encoding="utf-8")


def say(text: str) -> None:
    """What was asked for, to stdout."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def complain(text: str, command: str = "") -> None:
    """What is wrong, to stderr, a line each."""
    prefix = f"commutator {command}".strip()
    for line in text.splitlines():
        sys.stderr.write(f"{prefix}: error: {redact_text(line)}\n")


if __name__ == "__main__":
    main()
