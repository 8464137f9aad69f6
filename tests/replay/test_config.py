"""What a logger can be configured with, and what it says when that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from eventlog.errors import ConfigError
from replay import (
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
    load_config,
    open_backend,
)
from replay.backends import configured
from replay.config import log_root, resolve


@dataclass
class Experiment:
    """An experiment's config as AReaL has it, its own names and a logger's part."""

    experiment_name: str = "exp"
    trial_name: str = "t0"
    cluster: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(fileroot="/root"))
    stats_logger: object = field(default_factory=StatsLoggerConfig)


def test_a_bare_config_and_an_experiments_mean_the_same() -> None:
    """A logger's config is taken bare or as an experiment's `stats_logger`; AReaL refuses the bare one."""
    bare = StatsLoggerConfig("exp", "t0", "/root", wandb=WandBConfig(mode="offline", tags=["a"]))
    assert bare == resolve(bare) == resolve(Experiment(stats_logger=bare)) == resolve({"stats_logger": bare})


def test_any_object_with_these_names_will_do() -> None:
    """Foreign classes, mappings and OmegaConf's objects are read by name; other fields are tolerated."""
    wandb = SimpleNamespace(mode="offline", project="p", something_else=1)
    foreign = SimpleNamespace(experiment_name="e", trial_name="t", fileroot="/f", wandb=wandb, more=1)
    expected = StatsLoggerConfig("e", "t", "/f", wandb=WandBConfig(mode="offline", project="p"))
    assert expected == resolve(foreign)
    assert expected == resolve(OmegaConf.structured(expected))
    assert expected == resolve(
        {
            "experiment_name": "e",
            "trial_name": "t",
            "fileroot": "/f",
            "wandb": {"mode": "offline", "project": "p"},
        }
    )


def test_names_missing_in_the_loggers_part_are_the_experiments() -> None:
    """AReaL gives the names once, at the top: they are found there."""
    resolved = resolve(Experiment())
    assert ("exp", "t0", "/root") == (resolved.experiment_name, resolved.trial_name, resolved.fileroot)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensorbord": {"path": "tb"}}, r"stats_logger with .*, got tensorbord; near: tensorboard$"),
        ({"wandb": {"moed": "offline"}}, r"stats_logger\.wandb with mode, .*got moed; near: mode$"),
        ({"trackio": {"xyz": 1, "nam": "n"}}, r"stats_logger\.trackio with .*got nam, xyz; near: name$"),
        ({"seed": 1}, "stats_logger with .*got seed$"),
    ],
)
def test_a_mistyped_name_switches_nothing_off(tmp_path: Path, changes: dict, said: str) -> None:
    """A mapping is held against the names there are: bare, as an experiment's part, in YAML."""
    part = {"experiment_name": "e", "trial_name": "t", "fileroot": "/f"} | changes
    experiment = {"lr": 0.5, "stats_logger": part}
    file = tmp_path / "c.yaml"
    OmegaConf.save(OmegaConf.create(experiment), file)
    made = (
        part,
        experiment,
        Experiment(stats_logger=part),
        OmegaConf.create(part),
        OmegaConf.create(experiment),
    )
    for read, given in (*((resolve, config) for config in made), (load_config, file)):
        with pytest.raises(ConfigError, match=f"expected {said}"):
            read(given)
    with pytest.raises(ConfigError, match=r"expected stats_logger with .*got 'wandb'"):
        resolve(experiment | {"stats_logger": "wandb"})


@dataclass
class ForeignWandb:
    """Another version's section."""

    mode: str = "offline"
    watch: bool = True


@dataclass
class Foreign:
    """Another version's logger's part."""

    experiment_name: str = "e"
    trial_name: str = "???"
    wandb: ForeignWandb = field(default_factory=ForeignWandb)
    mlflow: str = "x"


@dataclass
class ForeignExperiment:
    """Another version's config."""

    trial_name: str = "t"
    fileroot: str = "/f"
    seed: int = 1
    stats_logger: Foreign = field(default_factory=Foreign)


@pytest.mark.parametrize("make", [ForeignExperiment, lambda: OmegaConf.structured(ForeignExperiment)])
def test_objects_may_have_more_fields(make: Any) -> None:
    """What a class gives, be it by OmegaConf, is no typing error; a missing value is looked up above."""
    expected = StatsLoggerConfig("e", "t", "/f", wandb=WandBConfig(mode="offline"))
    assert expected == resolve(make())
    assert expected == resolve(vars(expected) | {"stats_logger": {}, "seed": 1})


@pytest.mark.parametrize("name", ["experiment_name", "trial_name", "fileroot"])
def test_required_names_must_be_given(name: str) -> None:
    """A missing name is said by its place in the config."""
    config = {"experiment_name": "e", "trial_name": "t", "fileroot": "/f", name: "???"}
    with pytest.raises(ConfigError, match=f"expected stats_logger.{name}, got none: it is required"):
        resolve(config)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"wandb": WandBConfig(mode="onlin")},
            "wandb.mode to be one of online, offline, disabled, shared, got 'onlin'",
        ),
        (
            {"swanlab": SwanlabConfig(mode="x")},
            "swanlab.mode to be one of cloud, online, local, offline, disabled",
        ),
        ({"trackio": TrackioConfig(mode="x")}, "trackio.mode to be one of online, local, disabled, got 'x'"),
        ({"on_rewind": "ignore"}, "on_rewind to be one of warn, error, rewrite, new_run, got 'ignore'"),
    ],
)
def test_invalid_choices_are_refused_with_the_valid_ones(part: dict, said: str) -> None:
    """A mode that does not exist is refused naming those that do."""
    with pytest.raises(ConfigError, match=said):
        resolve(StatsLoggerConfig("e", "t", "/f", **part))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"wandb": [1]}, r"stats_logger\.wandb with mode, .*got \[1\]"),
        ({"wandb": "offline"}, r"stats_logger\.wandb with mode, .*got 'offline'"),
        ({"trackio": 3}, r"stats_logger\.trackio with mode, .*got 3"),
        ({"wandb": {"tags": 3}}, r"stats_logger\.wandb\.tags to be a list of texts, got 3"),
        ({"wandb": {"tags": [3]}}, r"stats_logger\.wandb\.tags to be a list of texts, got \[3\]"),
        ({"wandb": {"config": "x"}}, r"stats_logger\.wandb\.config to be a mapping, got 'x'"),
        ({"wandb": {"project": 2024}}, r"stats_logger\.wandb\.project to be text, got 2024"),
        ({"wandb": {"mode": ["offline"]}}, r"stats_logger\.wandb\.mode to be text, got \['offline'\]"),
        ({"tensorboard": {"path": 3}}, r"stats_logger\.tensorboard\.path to be text, got 3"),
        ({"tensorboard": {"path": ""}}, r"stats_logger\.tensorboard\.path to name a directory, got ''"),
        ({"swanlab": {"logdir": 9}}, r"stats_logger\.swanlab\.logdir to be text, got 9"),
        ({"trackio": {"project": 8}}, r"stats_logger\.trackio\.project to be text, got 8"),
        ({"on_rewind": 1}, r"stats_logger\.on_rewind to be text, got 1"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path: Path, part: dict, said: str) -> None:
    """Every field is held against its annotation, in Python and in YAML; the message names it."""
    config = {"experiment_name": "e", "trial_name": "t", "fileroot": "/f"} | part
    with pytest.raises(ConfigError, match=said):
        resolve(config)
    file = tmp_path / "c.yaml"
    OmegaConf.save(OmegaConf.create({"stats_logger": config}), file)
    with pytest.raises(ConfigError, match=said):
        load_config(file)


def test_paths_and_other_sequences_are_taken() -> None:
    """A path is as good as its text, a tuple as a list."""
    parts = {"tensorboard": {"path": Path("/tb")}, "wandb": {"tags": ("a", "b"), "config": {"lr": 1}}}
    config = resolve({"experiment_name": "e", "trial_name": "t", "fileroot": "/f"} | parts)
    assert ("/tb", ["a", "b"]) == (config.tensorboard.path, config.wandb.tags)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wandb", {"timeout": "abc"}, "expected wandb.timeout to be a number, got 'abc'"),
        ("wandb", {"project": 8}, "expected wandb.project to be text, got 8"),
        ("wandb", {"tags": [1]}, "expected wandb.tags to be text, or a list of texts, got"),
        ("wandb", {"project": "a/b"}, "expected a wandb project without any of .*got 'a/b'"),
        ("wandb", {"project": "p" * 129}, "expected a wandb project of at most 128 characters, got 129"),
        ("wandb", {"id": "a:b"}, "expected a wandb id without any of .*got 'a:b'"),
        ("tensorboard", {"double": "maybe"}, "expected tensorboard.double to be true or false, got 'maybe'"),
        ("tensorboard", {"path": ""}, "expected tensorboard.path to be a path, got ''"),
        ("trackio", {"path": 3}, "expected trackio.path to be a path, got 3"),
        ("swanlab", {"timeout": True}, "expected swanlab.timeout to be a number, got True"),
    ],
)
def test_options_of_another_type_are_refused(name: str, options: dict, said: str) -> None:
    """What a backend cannot use is refused when it is made, not where it fails."""
    with pytest.raises(ConfigError, match=said):
        open_backend(name, **options)


@pytest.mark.parametrize("text", ["no", "False", "0", "off", "false"])
def test_a_word_for_no_is_no(tmp_path: Path, text: str) -> None:
    """A boolean may come as a word, as a command line has it."""
    file = tmp_path / "tb"
    for double, kept in ((text, False), ("True", True)):
        backend = open_backend("tensorboard", path=file / double, double=double)
        assert kept is vars(backend)["_double"]


def test_the_log_root_is_areals() -> None:
    """Logs lie in fileroot/logs/user/experiment/trial; names with a slash lie deeper."""
    root = log_root(StatsLoggerConfig("e", "t", "/f"))
    assert ("/f/logs", "e", "t") == (str(root.parents[2]), root.parent.name, root.name)
    assert root.parent / "a" / "b" == log_root(StatsLoggerConfig("e", "a/b", "/f"))


@pytest.mark.parametrize("name", ["..", "../other", "/abs", "a/../../b", ".", "nul\0"])
def test_names_that_leave_the_log_root_are_refused(name: str) -> None:
    """No name writes outside the log root or on top of another trial."""
    for names in ((name, "t"), ("e", name)):
        with pytest.raises(ConfigError, match="to name a directory below the log root"):
            resolve(StatsLoggerConfig(*names, "/f"))


def test_yaml_is_read_with_dotted_overrides(tmp_path: Path) -> None:
    """A YAML file with the root key `stats_logger`, interpolations and overrides."""
    file = tmp_path / "stats_logger.yaml"
    file.write_text(
        "name: e\n"
        "stats_logger:\n"
        "  {experiment_name: '${name}', trial_name: t, fileroot: /f, wandb: {mode: offline}}\n"
    )
    config = load_config(
        file, ["stats_logger.wandb.project=p", "stats_logger.tensorboard.path=/tb", "name=other"]
    )
    assert (
        StatsLoggerConfig(
            "other",
            "t",
            "/f",
            wandb=WandBConfig(mode="offline", project="p"),
            tensorboard=TensorBoardConfig("/tb"),
        )
        == config
    )


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("a: 1\n", [], r"expected the key stats_logger, got \['a'\]"),
        ("- a: 1\n", [], "expected a YAML file with the key stats_logger, got "),
        ("stats_logger: {wandb: {mod: x}}\n", [], "expected stats_logger.wandb with mode.*got mod"),
        ("stats_logger: {trial: x}\n", [], "expected stats_logger with experiment_name.*got trial"),
        (
            "stats_logger: {}\n",
            ["wandb.mode=offline"],
            "expected overrides below a key of the file .*got wandb",
        ),
        ("stats_logger: {trial_name: '${nowhere}'}\n", [], "expected a YAML file with the key stats_logger"),
        ("{", [], "expected a YAML file with the key stats_logger"),
    ],
)
def test_a_wrong_yaml_is_refused(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    """A typing error is never a silent default."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file, overrides)


def test_a_missing_yaml_is_said(tmp_path: Path) -> None:
    """A file that is not there is a ConfigError with its path last."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml$"):
        load_config(tmp_path / "nowhere.yaml")


def test_only_what_is_switched_on_becomes_a_backend() -> None:
    """Disabled backends are not even looked at (report s12); the others carry their settings."""
    assert [] == configured(resolve(StatsLoggerConfig("e", "t", "/f")))
    config = StatsLoggerConfig(
        "e", "t", "/f", wandb=WandBConfig(mode="offline"), tensorboard=TensorBoardConfig("/tb")
    )
    assert ["wandb", "tensorboard"] == [backend.name for backend in configured(resolve(config))]


def test_key_and_address_reach_wandbs_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key goes into WANDB_API_KEY, the address into WANDB_BASE_URL, not crosswise (report s11)."""
    import os

    monkeypatch.setenv("WANDB_API_KEY", "before")
    monkeypatch.setenv("WANDB_BASE_URL", "before")
    wandb = WandBConfig(mode="offline", wandb_api_key="key", wandb_base_url="http://host")
    configured(resolve(StatsLoggerConfig("e", "t", "/f", wandb=wandb)))
    assert ("key", "http://host") == (os.environ["WANDB_API_KEY"], os.environ["WANDB_BASE_URL"])


def test_what_is_switched_on_becomes_a_backend() -> None:
    """Each section that is not disabled is a backend, with the options it gives (report s12)."""
    config = StatsLoggerConfig(
        "e",
        "t",
        "/f",
        wandb=WandBConfig(mode="offline"),
        swanlab=SwanlabConfig(mode="offline", logdir="/f/swan"),
        tensorboard=TensorBoardConfig(path="/f/tb"),
        trackio=TrackioConfig(mode="local"),
    )
    targets = {backend.name: backend.target for backend in configured(resolve(config))}
    assert {"wandb", "swanlab", "tensorboard", "trackio"} == set(targets)
    assert ("/f/swan", "/f/tb") == (targets["swanlab"], targets["tensorboard"])
    assert [] == configured(resolve(StatsLoggerConfig("e", "t", "/f")))


def test_a_root_that_is_no_path_is_refused() -> None:
    """A number is no fileroot."""
    with pytest.raises(ConfigError, match=r"expected stats_logger.fileroot as text or a path, got 5"):
        resolve({"experiment_name": "e", "trial_name": "t", "fileroot": 5})
