"""Secrets leave a config; everything else stays."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from eventlog.redaction import REDACTED, is_secret_name
from replay import redact_sensitive_config


class Mode(Enum):
    OFFLINE = "offline"


@dataclass
class Inner:
    api_key: str = "0123456789abcdef0123456789abcdef01234567"
    project: str = "p"
    mode: Mode = Mode.OFFLINE


@dataclass
class Outer:
    wandb: Inner = field(default_factory=Inner)
    max_new_tokens: int = 1024
    eos_token: str = "</s>"
    paths: tuple[Path, ...] = (Path("/data"),)
    servers: list[dict[str, object]] = field(default_factory=lambda: [{"password": "hunter2", "port": 80}])


def test_secrets_go_from_nested_dataclasses_dicts_and_lists() -> None:
    """Whatever the nesting, what stands under a secret's name is replaced and the rest is plain data."""
    config = Outer()
    before = copy.deepcopy(config)
    assert {
        "wandb": {"api_key": REDACTED, "project": "p", "mode": "offline"},
        "max_new_tokens": 1024,
        "eos_token": "</s>",
        "paths": ["/data"],
        "servers": [{"password": REDACTED, "port": 80}],
    } == redact_sensitive_config(config)
    assert before == config


@pytest.mark.parametrize(
    "name",
    ["api_key", "wandb_api_key", "apiKey", "API-KEY", "hf_token", "token", "secret", "client_secret",
     "password", "db.password", "aws_secret_access_key", "private_key", "credentials", "authToken",
     "Authorization", "passwd", "db_pass", "DB_PASSWORD2", "auth", "wandb_key", "openai_key",
     "hf_hub_token_1", "tokens", "user_tokens", "api_keys", "smtp-pass", "authkey", "pass_word", "HFToken",
     "clientSecretValue", "secret_value", "api_key_list", "pw", "hmac_key", "otp"],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    """Names that mean a secret are recognised in every spelling."""
    assert is_secret_name(name)
    assert REDACTED == redact_sensitive_config({name: "value"})[name]


def test_a_name_and_its_value_may_stand_apart() -> None:
    """As containers have it, as pairs, and under keys that are no text."""
    given = {
        "env": [{"name": "HF_TOKEN", "value": "x"}, {"name": "LR", "value": "1"}],
        "pairs": [("password", "x"), ("lr", "1")],
        b"api_key": "x",
        ("wandb", "api_key"): "x",
    }
    assert {
        "env": [{"name": "HF_TOKEN", "value": REDACTED}, {"name": "LR", "value": "1"}],
        "pairs": [["password", REDACTED], ["lr", "1"]],
        "api_key": REDACTED,
        "wandb/api_key": REDACTED,
    } == redact_sensitive_config(given)


@pytest.mark.parametrize(
    "text",
    ["https://TOKEN@github.com/x", "postgres://u:p@TOKEN@host/db", "password : TOKEN",
     "machine api.wandb.ai login user password TOKEN", "bearer TOKENTOKENTOKENTOKEN",
     *(f"{kind}{'TOKEN' * 8}" for kind in ("nvapi-", "xai-", "tvly-", "pypi-", "gsk_", "npm_"))],
)  # fmt: skip
def test_keys_are_known_within_texts(text: str) -> None:
    """Logins of URLs and files, and what services call their keys."""
    assert "TOKEN" not in redact_sensitive_config({"x": text})["x"]


@pytest.mark.parametrize(
    "name",
    ["n_tokens", "max_new_tokens", "tokenizer_path", "pad_token_id", "eos_token", "pad_token", "key", "keys",
     "monkey", "primary_key", "passes", "secretary", "author", "token_budget", "api_key_file_count",
     "token_level_loss", "keyboard", "pass_at_k", "pass_1", "pass@1", "bypass", "forward_pass", "stop_tokens",
     "special_tokens", "signature", "eos_token_2", "num_tokens", "max_tokens", "sort_key", "oauth_flow",
     "authors"],
)  # fmt: skip
def test_names_that_only_look_like_it_are_left_alone(name: str) -> None:
    """A language model's config is full of tokens and keys that are no secrets."""
    assert not is_secret_name(name)
    assert "value" == redact_sensitive_config({name: "value"})[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sk-abcdefghijklmnopqrstuvwx", REDACTED),
        ("use hf_ABCDEFGHIJKLMNOPQRSTUV now", f"use {REDACTED} now"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", REDACTED),
        ("AKIAABCDEFGHIJKLMNOP", REDACTED),
        ("Bearer abc.def", f"Bearer {REDACTED}"),
        ("https://user:pw@host/x", f"https://{REDACTED}@host/x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", REDACTED),
        ("WANDB_API_KEY=0123 python train.py", f"WANDB_API_KEY={REDACTED} python train.py"),
        ("--hf-token=abc --lr=1e-3", f"--hf-token={REDACTED} --lr=1e-3"),
        ("d7c0e1a9b8f7e6d5c4b3a2918070605040302010", "d7c0e1a9b8f7e6d5c4b3a2918070605040302010"),
        ("lr=1e-3, tokens=4096", "lr=1e-3, tokens=4096"),
        ("lr=1e-3 tokens=abc", f"lr=1e-3 tokens={REDACTED}"),
        ("train --api-key abc --lr 1", f"train --api-key {REDACTED} --lr 1"),
        ("--password 'a b' -x", f"--password {REDACTED} -x"),
        ("--use-auth --lr 1 --tokens 4096", "--use-auth --lr 1 --tokens 4096"),
        ('{"api_key": "abc", "lr": 1}', f'{{"api_key": {REDACTED}, "lr": 1}}'),
        ("https://hooks.slack.com/services/T000/B000/abc", f"https://hooks.slack.com/{REDACTED}"),
        ("https://discord.com/api/webhooks/12/abc", f"https://discord.com/api/webhooks/{REDACTED}"),
        ("AIzaSyA0123456789012345678901234567890ab", REDACTED),
        ('{"api_key":"abc","lr":1}', f'{{"api_key":{REDACTED},"lr":1}}'),
        ('{"password":"a\\"b c"}', f'{{"password":{REDACTED}}}'),
        ("{'hf_token':'abc'}", f"{{'hf_token':{REDACTED}}}"),
        ("Authorization: Basic QWxhZGRpbjpvcGVu", f"Authorization: {REDACTED}"),
        ("Authorization: token ghx_abc, x", f"Authorization: {REDACTED}, x"),
        ("http.extraheader=AUTHORIZATION: basic QWxh", f"http.extraheader=AUTHORIZATION: {REDACTED}"),
        ('curl -H "Authorization: Bearer abc.def" h', f'curl -H "Authorization: {REDACTED}" h'),
        ('{"Authorization":"Basic QWxh","n":1}', f'{{"Authorization":"{REDACTED}","n":1}}'),
        ('Authorization: Digest username="u", response="abc"', f"Authorization: {REDACTED}"),
        ("https://s3/x?X-Amz-Signature=abc&n=1", f"https://s3/x?X-Amz-Signature={REDACTED}&n=1"),
        ("https://a.blob/x?sv=2&sig=a%2Bb%3D", f"https://a.blob/x?sv=2&sig={REDACTED}"),
        ("curl -u user:pw https://host", f"curl -u user:{REDACTED} https://host"),
        ("curl --user=user:pw", f"curl --user=user:{REDACTED}"),
        ("docker run -u 1000:1000 image", "docker run -u 1000:1000 image"),
        (
            "https://open.feishu.cn/open-apis/bot/v2/hook/a-1",
            f"https://open.feishu.cn/open-apis/bot/v2/hook/{REDACTED}",
        ),
        ('{"a": {"password":"x", "n": 1}}', f'{{"a": {{"password":{REDACTED}, "n": 1}}}}'),
        ('cmd=run api_keys=["a", "b"] n=1', f"cmd=run api_keys={REDACTED} n=1"),
        ('extra=[{"hf_token": "a"}]', f'extra=[{{"hf_token": {REDACTED}}}]'),
        ("sig=0.5 signature: dense", "sig=0.5 signature: dense"),
        ("password => abc, n => 1", f"password => {REDACTED}, n => 1"),
    ],
)
def test_text_that_looks_like_a_secret_is_replaced(text: str, expected: str) -> None:
    """Known kinds of keys go wherever they stand, also within a text; a commit id is none."""
    assert [expected] == redact_sensitive_config([text])


def test_an_option_before_its_value_is_known() -> None:
    """A command line as a list gives its secret away in the next element."""
    assert ["run", "--api-key", REDACTED, "--lr", "1"] == redact_sensitive_config(
        ["run", "--api-key", "abc", "--lr", "1"]
    )
    assert ["curl", "-u", f"me:{REDACTED}", "-u", "1:1"] == redact_sensitive_config(
        ["curl", "-u", "me:pw", "-u", "1:1"]
    )


def test_switches_and_sizes_under_a_secrets_name_stay() -> None:
    """A number of tokens or a switch is no secret, a password of digits is; empty values show as empty."""
    config = {"token": 4096, "use_token": True, "password": 1234, "api_key": "", "secret": None}
    assert {"token": 4096, "use_token": True, "password": REDACTED, "api_key": "", "secret": None} == (
        redact_sensitive_config(config)
    )


def test_of_several_tokens_only_texts_are_secrets() -> None:
    """A number of tokens is configuration, a list of them as text is not."""
    config = {"tokens": 4096, "api_tokens": ["a", "b"], "hf_tokens": "a", "user_tokens": {"train": 5}}
    expected = {**config, "api_tokens": [REDACTED, REDACTED], "hf_tokens": REDACTED}
    assert expected == redact_sensitive_config(config)
    plain = {"token_level_loss": True, "use_auth": True, "pass_1": 0.5, "forward_pass": 2, "n_tokens": 3}
    assert plain == redact_sensitive_config(plain)


def test_whatever_it_gets_json_can_hold_the_result() -> None:
    """Objects with attributes, sets, classes and cycles come back as something that JSON can hold."""
    loop: dict[str, object] = {"a": 1}
    loop["self"] = loop
    config = {"space": SimpleNamespace(token="x", n=1), "set": {1}, "class": Inner, "loop": loop, 3: b"raw"}
    said = redact_sensitive_config(config)
    assert '"set": [1]' in json.dumps(said)
    assert {"token": REDACTED, "n": 1} == said["space"]


class Level(IntEnum):
    HIGH = 3


class Text(str):
    """A text of a class of its own."""

    __slots__ = ()


class Login(NamedTuple):
    user: str
    token: str


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(2.5), 2.5),
        (Level.HIGH, 3),
        (Text("x"), "x"),
        (2**64 - 1, 2**64 - 1),
        (2**70, str(2**70)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        ("a\udc80b", "a\\udc80b"),
    ],
    ids=str,
)
def test_values_are_plain_numbers_and_texts_that_any_encoder_takes(value: Any, expected: Any) -> None:
    """Numbers of numpy, enums and own classes become plain; what no tracker can hold becomes text."""
    said = redact_sensitive_config({"x": value})["x"]
    assert (type(expected), expected) == (type(said), said)


def test_keys_that_are_no_unicode_are_spelled_out() -> None:
    """The name of a field may come from a file's name."""
    assert {"a\\udc80": 1} == redact_sensitive_config({"a\udc80": 1})


def test_a_named_tuple_has_names() -> None:
    """Its fields are those of a dataclass, and pairs of a name and `val` are known, too."""
    assert {"user": "me", "token": REDACTED} == redact_sensitive_config(Login("me", "abc"))
    assert [{"key": "DB_PASSWORD", "val": REDACTED}] == redact_sensitive_config(
        [{"key": "DB_PASSWORD", "val": "abc"}]
    )
