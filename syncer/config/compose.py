"""From YAML and ``key=value`` words to the typed configuration, through Hydra's compose API.

Decides: which files are merged, in which order; and how an error of Hydra or OmegaConf reads: one line with the key,
the value and the legal range, as a ValueError like those of ``keys.validate``. No DictConfig leaves this room but to
be printed.

Why not ``hydra.main``: a server wants no output folders, log files or working directory of Hydra's, its exit code is
its own, and one process is one run. Must not know: what is legal (``keys.py``), the command line's flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

from syncer.config.keys import SYNCER, AnyKeys, Keys
from syncer.config.rules import shown, wrong

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_HERE = Path(__file__).resolve().parent.parent
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # in a wheel; in a checkout
PRESETS = tuple(sorted(path.stem for path in (CONF / "preset").glob("*.yaml")))

S = TypeVar("S", bound="DataclassInstance")


def compose(
    overrides: list[str], config_dir: str | None = None, config_name: str | None = None, keys: AnyKeys = SYNCER
) -> DictConfig:
    """The merged configuration, typed but neither complete nor validated. Raises ValueError, one line.

    Later wins: the defaults of the keys, the preset, the file ``config_name`` in ``config_dir``, the overrides.
    """
    _check_overrides(keys, overrides)
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ValueError(f"--config-dir {config_dir}: must be an existing folder")
    try:
        store = ConfigStore.instance()
        store.store(name="schema", node=keys.schema)
        store.store(name="primary", node={"defaults": [*_layers(keys, config_dir, config_name), "_self_"]})
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("primary", [*overrides, *_search_path(config_dir)])
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        given = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
        raise _explained(keys, error, given) from error


def typed_as(keys: Keys[S], config: DictConfig) -> S:
    """The schema object, all keys given. Raises ValueError for missing or unknown keys and failing interpolations."""
    if OmegaConf.get_type(config) is not keys.schema:
        raise _not_ours(keys)
    given = _flat(config)
    for key, value in given.items():
        if key in keys.sections:
            raise _no_section(keys, key, value)
        if key not in keys.rules:
            raise _unknown(keys, key)
    for key in keys.rules:
        if given.get(key) == "???":
            raise keys.missing(key)
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise _explained(keys, error, given) from error
    if not isinstance(result, keys.schema):
        raise TypeError(f"the schema gave a {type(result).__name__}")
    return result


def as_yaml(config: DictConfig, resolve: bool, keys: AnyKeys = SYNCER) -> str:
    """What ``--cfg job`` prints. Raises ValueError if an interpolation is to be resolved and cannot."""
    try:
        return OmegaConf.to_yaml(config, resolve=resolve)
    except OmegaConfBaseException as error:
        raise _explained(keys, error, _flat(config)) from error


def _layers(keys: AnyKeys, config_dir: str | None, config_name: str | None) -> list[str]:
    """The configurations to merge, in order.

    A file of keys only is laid over our own configuration; one with a defaults list says itself what it builds on.
    """
    if config_name is None:
        return [keys.primary]
    name = config_name.removesuffix(".yaml")
    file = Path(config_dir or CONF) / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"--config-name {config_name}: must be a YAML file in {file.parent}")
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if not isinstance(content, dict):
        raise ValueError(f"--config-name {config_name}: {file} must be a mapping of keys")
    for section in keys.sections:  # of this Hydra would tell the class, not the key
        if section in content and not isinstance(content[section], dict):
            raise _no_section(keys, section, content[section])
    return [name] if "defaults" in content else [keys.primary, name]


def _search_path(config_dir: str | None) -> list[str]:
    """The override that makes Hydra look into a folder of the user's, quoted for Hydra's grammar."""
    if config_dir is None:
        return []
    quoted = str(Path(config_dir).resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def _check_overrides(keys: AnyKeys, overrides: list[str]) -> None:
    """Refuse unknown and removed keys by name; the preset and Hydra's own keys are not ours to check."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        if key not in keys.rules and key not in keys.sections and key.partition(".")[0] not in ("preset", "hydra"):
            raise _unknown(keys, key or override)
        if override.startswith("~"):
            raise ValueError(f"{shown(override)}: a key cannot be removed, it must be given a legal value (see --help)")


def _flat(config: DictConfig) -> dict[str, object]:
    """Dotted key -> value, interpolations and missing marks as they were written."""
    content = OmegaConf.to_container(config, resolve=False)
    flat: dict[str, object] = {}
    for key, value in content.items() if isinstance(content, dict) else ():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{key!s}.{name}".removesuffix("."): item for name, item in inner.items()}
    return flat


def _unknown(keys: AnyKeys, key: str) -> ValueError:
    if key in keys.rules or key in keys.sections:  # known to us, but not to what was composed
        return _not_ours(keys)
    top = [name for name in keys.rules if "." not in name] + [f"{name}.*" for name in keys.sections]
    known = _keys_of(keys, key.partition(".")[0]) or top
    return ValueError(f"{shown(key)}: unknown key; known are {', '.join(known)}")


def _no_section(keys: AnyKeys, key: str, value: object) -> ValueError:
    return wrong(key, value, "a group of keys: " + ", ".join(_keys_of(keys, key)))


def _keys_of(keys: AnyKeys, section: str) -> list[str]:
    return [name for name in keys.rules if name.startswith(section + ".")]


def _not_ours(keys: AnyKeys) -> ValueError:
    begins = f"one whose defaults list begins with `{keys.primary}`"
    return ValueError(f"--config-name: must be a file of keys only, or {begins}")


def _explained(keys: AnyKeys, error: BaseException, given: Mapping[str, object]) -> ValueError:
    """One line with the key, the value as it was given and the legal range, from whatever Hydra or OmegaConf raised."""
    cause: BaseException | None = error
    while cause is not None:
        if (explanation := _explained_cause(keys, cause, given)) is not None:
            return explanation
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return ValueError(f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}")
    for key, value in given.items():
        if key == "preset" and "Config group override" in str(error):
            return wrong("preset", value, "one of " + ", ".join(PRESETS))
        if f"{key}={value}" in str(error):
            return _illegal(keys, key, value, error)
    return ValueError(_line(error))


def _explained_cause(keys: AnyKeys, cause: BaseException, given: Mapping[str, object]) -> ValueError | None:
    """Hydra wraps the error that knows the key, sometimes twice; None where this one knows nothing."""
    if isinstance(cause, MissingConfigException) and (cause.missing_cfg_file or "").startswith("preset/"):
        legal = "one of " + ", ".join(cause.options or PRESETS)
        return wrong("preset", str(cause.missing_cfg_file).removeprefix("preset/"), legal)
    if isinstance(cause, OverrideParseException):
        return ValueError(f"{_line(cause.override)}: cannot be read as key=value ({_line(cause.message)})")
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    key = str(cause.full_key)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return _unknown(keys, key)
    if key in keys.sections:
        return _no_section(keys, key, given.get(key, cause.value))
    if key in keys.rules and isinstance(cause, ValidationError):
        return wrong(key, cause.value, keys.rules[key].legal)
    return _illegal(keys, key, given.get(key), cause)


def _illegal(keys: AnyKeys, key: str, value: object, error: BaseException) -> ValueError:
    """For errors that are not about the value's type alone: the foreign message tells more than the range."""
    rule = keys.rules.get(key.partition("[")[0])
    told = key if value is None else f"{key}={shown(value)}"
    return ValueError(f"{told}: {_line(error)}" + (f"; must be {rule.legal}" if rule else ""))


def _line(text: object) -> str:
    """The first line of a foreign message, and what it announces with a colon."""
    first, *rest = str(text).strip().splitlines() or [""]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
