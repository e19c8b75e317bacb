"""``python -m syncer [key=value ...]``: YAML and overrides -> typed configuration -> policy -> run; nothing else.

Hydra composes through its compose API, not ``hydra.main``: a server wants no output folders, no log files, no working
directory of its own, and one process is one run. What Hydra or OmegaConf dislike becomes the same single line as what
``config.validate`` dislikes, and exit code 2, before torch is imported, a socket opened or a file touched.

Must not know: what any key means (``config.py``), how a run goes (``run.py``).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omegaconf import DictConfig

    from syncer.config import SyncerConfig

_HERE = Path(__file__).resolve().parent
_CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # in a wheel; in a checkout
_PRESETS = sorted(path.stem for path in (_CONF / "preset").glob("*.yaml"))

log = logging.getLogger("syncer")


def main(argv: list[str]) -> int:
    """Returns the exit code: 2 for a configuration error, else what the run returns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until run() installs its own: nothing is open yet, so just leave
        signal.signal(number, lambda *_: os._exit(130))
    from syncer.config import profile_record, validate, warnings  # after the handlers: it takes a tenth of a second

    try:
        arguments = _arguments(argv)
        config = compose(arguments.overrides, arguments.config_dir, arguments.config_name)
        if arguments.cfg:
            print(_yaml(config, arguments.resolve), end="")
            return 0
        policy = validate(_typed(config))
        profile = profile_record(policy).hash
    except ValueError as error:
        print("syncer: configuration error:", " ".join(str(error).split()), file=sys.stderr)
        return 2

    _set_up_logging()
    for warning in warnings(policy):
        log.warning("%s", warning)
    log.info("profile hash %s", profile.hex())
    from syncer.run import run  # torch, seconds: not before the configuration is known to be right

    return run(policy, profile)


def compose(overrides: list[str], config_dir: str | None = None, config_name: str | None = None) -> DictConfig:
    """The merged configuration, not yet validated. Raises ValueError, one line, for whatever Hydra refuses."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    from syncer.config import SyncerConfig

    _check_keys(overrides)
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ValueError(f"--config-dir {config_dir}: must be an existing folder")
    try:
        store = ConfigStore.instance()
        store.store(name="schema", node=SyncerConfig)
        store.store(name="primary", node={"defaults": [*_layers(config_dir, config_name), "_self_"]})
        with initialize_config_dir(str(_CONF), version_base="1.3"):
            return hydra_compose("primary", [*overrides, *_search_path(config_dir)])
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise _explained(error, overrides) from error


def _search_path(config_dir: str | None) -> list[str]:
    """The override that makes Hydra look into a folder of the user's, quoted for Hydra's grammar."""
    if config_dir is None:
        return []
    quoted = str(Path(config_dir).resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def _layers(config_dir: str | None, config_name: str | None) -> list[str]:
    """The configurations to merge, in order.

    A file of keys only is laid over our own configuration; one with a defaults list says itself what it builds on.
    """
    from omegaconf import OmegaConf

    if config_name is None:
        return ["config"]
    name = config_name.removesuffix(".yaml")
    file = Path(config_dir or _CONF) / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"--config-name {config_name}: must be a YAML file in {file.parent}")
    return [name] if "defaults" in OmegaConf.load(file) else ["config", name]


def _check_keys(overrides: list[str]) -> None:
    """Refuse unknown and removed keys by name; the preset and Hydra's own keys are not ours to check."""
    from syncer.config import RULES, SECTIONS
    from syncer.rules import shown

    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        if key not in RULES and key not in SECTIONS and key.partition(".")[0] not in ("preset", "hydra"):
            raise _unknown(key or override)
        if override.startswith("~"):
            raise ValueError(f"{shown(override)}: a key cannot be removed, it must be given a legal value (see --help)")


def _unknown(key: str) -> ValueError:
    from syncer.config import RULES, SECTIONS
    from syncer.rules import shown

    section = key.partition(".")[0]
    known = [name for name in RULES if name.startswith(section + ".")] if section in SECTIONS else []
    others = known or [name for name in RULES if "." not in name] + [f"{name}.*" for name in SECTIONS]
    return ValueError(f"{shown(key)}: unknown key; known are {', '.join(others)}")


def _no_section(key: str, value: object) -> ValueError:
    from syncer.config import RULES
    from syncer.rules import wrong

    return wrong(key, value, "a group of keys: " + ", ".join(name for name in RULES if name.startswith(key + ".")))


def _typed(config: DictConfig) -> SyncerConfig:
    """Past this door there is no DictConfig. Raises ValueError for missing or unknown keys and bad interpolations."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from syncer.config import RULES, SECTIONS, SyncerConfig, missing

    if OmegaConf.get_type(config) is not SyncerConfig:
        raise ValueError("--config-name: must be a file of keys only, or one whose defaults list begins with `config`")
    given: dict[str, Any] = {}
    for key, value in _plain(config).items():
        given |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    for key, value in given.items():
        if key in SECTIONS:
            raise _no_section(key, value)
        if key not in RULES:
            raise _unknown(key)
    for key in RULES:
        if given.get(key) == "???":
            raise missing(key)
    try:
        typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise _explained(error) from error
    if not isinstance(typed, SyncerConfig):
        raise TypeError(f"the schema gave a {type(typed).__name__}")
    return typed


def _plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as nested dicts, interpolations and missing marks as they were written."""
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(config, resolve=False)
    if not isinstance(content, dict):
        raise TypeError(f"a configuration of type {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _yaml(config: DictConfig, resolve: bool) -> str:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_yaml(config, resolve=resolve)
    except OmegaConfBaseException as error:
        raise _explained(error) from error


def _explained(error: BaseException, overrides: Iterable[str] = ()) -> ValueError:
    """One line with the key, the value and the legal range, from whatever Hydra or OmegaConf raised."""
    from yaml import YAMLError

    from syncer.rules import shown, wrong

    cause: BaseException | None = error
    while cause is not None:
        explanation = _explained_cause(cause)
        if explanation is not None:
            return explanation
        cause = cause.__cause__ or cause.__context__
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "preset" and "Config group override" in str(error):
            return wrong("preset", value, "one of " + ", ".join(_PRESETS))
        if repr(override) in str(error):
            return _illegal(key.lstrip("+"), error)
    return ValueError(shown(error) if isinstance(error, YAMLError) else _line(error))


def _explained_cause(cause: BaseException) -> ValueError | None:
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

    from syncer.config import RULES, SECTIONS
    from syncer.rules import wrong

    if isinstance(cause, MissingConfigException) and (cause.missing_cfg_file or "").startswith("preset/"):
        legal = "one of " + ", ".join(cause.options or _PRESETS)
        return wrong("preset", str(cause.missing_cfg_file).removeprefix("preset/"), legal)
    if isinstance(cause, OverrideParseException):
        return ValueError(f"{_line(cause.override)}: cannot be read as key=value ({_line(cause.message)})")
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    key = str(cause.full_key)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return _unknown(key)
    if key in SECTIONS:
        return _no_section(key, cause.value)
    if key in RULES and isinstance(cause, ValidationError):
        return wrong(key, cause.value, RULES[key].legal)
    return _illegal(key, cause)


def _illegal(key: str, error: BaseException) -> ValueError:
    from syncer.config import RULES

    rule = RULES.get(key.partition("[")[0])
    return ValueError(f"{key}: {_line(error)}" + (f"; must be {rule.legal}" if rule else ""))


def _line(text: object) -> str:
    """The first line of a foreign message, and what it announces with a colon."""
    first, _, rest = str(text).strip().partition("\n")
    return f"{first} {rest.strip()}" if first.endswith(":") else first


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong command line is a configuration error like any other: one line, no usage text."""
        raise ValueError(f"command line: {message} (--help shows what is known)")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m syncer",
        description="The coordinator of a fleet of learners. Required: learners=M total_steps=T.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see the list of keys below")
    parser.add_argument("-h", "--help", action="store_true", help="show this, and every key, then exit")
    parser.add_argument(
        "-cd", "--config-dir", metavar="DIR", help="a folder with configurations and presets of your own"
    )
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="a file in DIR that is laid over the defaults")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the configuration as YAML, then exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: interpolations replaced by their values")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.help:
        parser.epilog = _key_table()
        parser.print_help()
        parser.exit()
    if arguments.resolve and not arguments.cfg:
        parser.error("--resolve goes with --cfg job")
    return arguments


def _key_table() -> str:
    from syncer.config import DEFAULTS, RULES
    from syncer.rules import shown

    lines = [
        f"preset={'|'.join(_PRESETS)}",
        "    a named regime of outer.*, merge.* and schedule.*; single keys override it (default: balanced)",
    ]
    for key, rule in RULES.items():
        default = DEFAULTS[key]
        told = "no default" if default == "???" else shown(default)
        lines += [f"{key}={told}", f"    {rule.meaning}: {rule.legal}"]
    return "keys and their defaults:\n  " + "\n  ".join(lines)


def _set_up_logging() -> None:
    """Plain lines on stderr; the messages scripts look for stand in them verbatim."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
