"""Taking the secrets out of a config before it is written anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

REDACTED: Final = "<redacted>"
_DEEPEST: Final = 50

# Words of a name. "token" alone would hit pad_token and eos_token, which are no secrets: see _HARMLESS.
_SECRET_NAME: Final = re.compile(
    r"(?:api|access|private|secret|signing|encryption|account|ssh|hmac)_?keys?(?:_?ids?)?$"
    r"|(?:^|_)(?:wandb|swanlab|openai|anthropic|gemini|google|azure|aws|s3|oss|hf|hub|huggingface|github|gitlab|slack"
    r"|sentry|comet|neptune|mlflow|clearml|deepseek|dashscope|moonshot|mistral|cohere|groq|together|serper|tavily"
    r"|auth|master|license|webhook)_keys?$"
    r"|(?:^|_)(?:token|secret|secrets|pass|password|passwords|passwd|passphrase|pwd|pw|credential|credentials|auth"
    r"|authorization|cookie|cookies|otp|totp)$"
    r"|(?:^|_)(?:apikey|authkey|bearer|pass_word|passcode)$"
)
_HARMLESS: Final = re.compile(
    r"(?:^|_)(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|think|image|video|audio|special|chat|tool|next|new|per"
    r"|cost|first|last|max|min|num|n)_token$"
    r"|(?:^|_)(?:first|second|last|forward|backward|one|two|single|multi|full|per|each|num|n|max|min)_pass$"
)
# Several of them, which may as well be counted: only text is one.
_SECRET_TEXTS: Final = re.compile(
    r"^tokens$|^(?:\w+_)?(?:api|access|auth|hf|hub|user|refresh|bearer|secret)_tokens$"
)
_SECRET_VALUE: Final = re.compile(
    r"\b(?:sk|pk|rk|xai|tvly|nvapi|pypi)-[A-Za-z0-9_-]{16,}"
    r"|\b(?:hf|gsk|r8|npm|dop_v1)_[A-Za-z0-9]{16,}|\bya29\.[A-Za-z0-9_-]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|(?<=hooks\.slack\.com/)[A-Za-z0-9_/-]+|(?<=/api/webhooks/)[A-Za-z0-9_/-]+"
    r"|(?<=/bot/v2/hook/)[A-Za-z0-9_-]+|(?<=/webhook/send\?key=)[A-Za-z0-9_-]+"
    r"|\bxox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|\bwandb_v\d_[A-Za-z0-9_]{16,}|\blocal-[0-9a-f]{40}\b"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=\bBearer )\S+|(?<=\bbearer )[A-Za-z0-9._~+/-]{16,}"
    r"|(?<=://)[^/\s:@]*:[^/\s]+(?=@)|(?<=\bhttp://)[^/\s:@]+(?=@)|(?<=\bhttps://)[^/\s:@]+(?=@)"
)
_ASSIGNED: Final = re.compile(
    r"(?P<name>[A-Za-z][\w-]*)(?P<sign>\\*[\"']\s*:\s*|[\"']?(?:\s*=>?\s*|\s?:\s+))(?=\S)"
)
_VALUE: Final = re.compile(
    r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\[[^\]]*\]|\{[^}]*\}|[^\s,;&]+", re.DOTALL
)
_DONE: Final = re.compile(rf"[\\\"']*{REDACTED}[\\\"'}})\]]*")
# The scheme, `name=value, …` of those that have several parts, and the credential.
_HEADER: Final = re.compile(
    r"(?P<before>\bauthorization\\*[\"']?\s*[:=]\s*\\*[\"']?)"
    r"(?:[A-Za-z][\w-]*[ \t]+)?(?:[\w-]+=(?:\"[^\"]*\"|[^\s\",]*),\s*)*[^\s\"',;\\]+",
    re.IGNORECASE,
)
_SIGNED: Final = re.compile(
    r"(?P<before>[?&](?:[\w-]*-)?(?:sig|signature|credential)=)[^&\s\"']+", re.IGNORECASE
)
_NETRC: Final = re.compile(r"(?P<before>\blogin\s+\S+\s+password\s+)\S+")
_LOGIN: Final = re.compile(  # of curl; `docker run -u 1000:1000` is none
    r"(?P<before>(?<!\S)(?:-u|-U|--user|--proxy-user)(?:\s+|=)[\"']?[^\s:\"']+:)(?!\d+(?!\S))[^\s\"']+"
)
_OPTION: Final = re.compile(
    r"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*)(?P<sign>\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s-]\S*)"
)


def redact_sensitive_config(config: Any) -> Any:
    """Return a config as plain dicts, lists and values that JSON can hold, its secrets replaced.

    Taken as a secret: what stands under a name such as api_key, hf_token, secret or password (also as
    `name=value` within a text or as an option before its value in a list), and text that looks like a known
    kind of key, an authorization header, a private key, or a password or signature within a URL. Dataclasses,
    mappings, lists and objects with attributes may be nested at will; the argument is not changed.
    """
    return _redact(config, 0)


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is taken as a secret; of `tokens` and the like, a text."""
    snake = _snake(name)
    if _HARMLESS.search(snake):
        return False
    return bool(_SECRET_NAME.search(snake) or _SECRET_TEXTS.search(snake))


def _snake(name: str) -> str:
    """Return a name in lower case with "_" between its words, without what says nothing of it behind them.

    That is a number (but of pass_1), or that there is a value, or are several.
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    snake = re.sub(r"(?<=\w)_(?:value|list)s?$", "", re.sub(r"[-.]", "_", apart).lower().strip("_"))
    plain = re.sub(r"_?\d+$", "", snake)
    return snake if plain.endswith("pass") else plain


def _redact(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return _redact(value.value, depth + 1)
    if hasattr(type(value), "item") and hasattr(type(value), "ndim") and value.ndim == 0:
        value = value.item()  # a number of numpy or torch
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # not of a class of its own, which no encoder knows
        return int(value) if -(2**63) <= value < 2**64 else str(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return _redact_text(value)
    if depth > _DEEPEST:
        return f"<{type(value).__name__}>"
    if (named := _named(value)) is not None:
        texts = {_text(key): inner for key, inner in named.items()}
        called = texts.get("name", texts.get("key"))  # of {name: HF_TOKEN, value: …}, as containers have it
        for told in ("value", "val"):
            if isinstance(called, str) and told in texts:
                texts[told] = _redact_named(called, texts[told], depth + 1)
        return {name: _redact_named(name, inner, depth + 1) for name, inner in texts.items()}
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "ListConfig":
        return _redact_list(list(value), depth + 1)
    return _redact_text(str(value))


def _text(key: Any) -> str:
    if isinstance(key, tuple):
        return "/".join(map(_text, key))
    return key.decode(errors="replace") if isinstance(key, bytes) else _encodable(str(key))


def _encodable(text: str) -> str:
    """Return a text with lone surrogates, as names of files may have them, spelled out."""
    return text.encode(errors="backslashreplace").decode()


def _named(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):  # a named tuple
        return dict(zip(names, value, strict=False))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    attributes = getattr(value, "__dict__", None)
    plain = isinstance(attributes, dict) and not isinstance(value, type) and not callable(value)
    return attributes if plain and type(value).__str__ is object.__str__ else None


def _redact_named(name: str, value: Any, depth: int) -> Any:
    # Numbers and switches are no secrets ("token: 4096"), except a password of digits.
    if not is_secret_name(name) or value is None or isinstance(value, bool):
        return _redact(value, depth)
    if _SECRET_TEXTS.search(_snake(name)) and not isinstance(value, str):
        texts = isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
        return [REDACTED] * len(value) if texts else _redact(value, depth)
    if isinstance(value, (int, float)) and not re.search(r"pass|pwd|secret", name, re.IGNORECASE):
        return value
    return REDACTED if value not in ("", [], {}) else value


def _redact_list(values: list[Any], depth: int) -> list[Any]:
    if len(values) == 2 and isinstance(values[0], str) and is_secret_name(values[0]):  # a name and its value
        return [values[0], _redact_named(values[0], values[1], depth)]
    options = [
        isinstance(v, str) and v.startswith("-") and "=" not in v and is_secret_name(v) for v in values
    ]
    return [
        REDACTED if at and options[at - 1] and isinstance(value, str) else _redact(value, depth)
        for at, value in enumerate(map(_without_login, [None, *values], values))
    ]


def _without_login(before: Any, value: Any) -> Any:
    """Return an element of a list without the password that an option before it announces."""
    if not (isinstance(before, str) and isinstance(value, str)):
        return value
    found = _LOGIN.fullmatch(f"{before} {value}")
    return f"{found['before'].removeprefix(f'{before} ')}{REDACTED}" if found else value


def _redact_text(text: str) -> str:
    text = _encodable(text)
    for pattern in (_HEADER, _SIGNED, _NETRC, _LOGIN):
        text = pattern.sub(rf"\g<before>{REDACTED}", text)
    text = _SECRET_VALUE.sub(REDACTED, text)
    return _OPTION.sub(_redact_option, _redact_assigned(text))


def _redact_assigned(text: str) -> str:
    """Replace what is assigned to secret names; within what is assigned to others there may be more."""
    kept: list[str] = []
    at = 0
    while (found := _ASSIGNED.search(text, at)) is not None:
        value = _VALUE.match(text, found.end())
        secret = value is not None and _is_secret(found["name"], value[0])
        kept += [text[at : found.end()], REDACTED if secret else ""]
        at = value.end() if value is not None and secret else found.end()
    return "".join(kept) + text[at:]


def _redact_option(match: re.Match[str]) -> str:
    secret = _is_secret(match["name"], match["value"])
    return f"{match['name']}{match['sign']}{REDACTED}" if secret else match[0]


def _is_secret(name: str, value: str) -> bool:
    counted = _SECRET_TEXTS.search(_snake(name)) and re.fullmatch(r"[\d_.,e+-]+", value)
    return is_secret_name(name) and not counted and not _DONE.fullmatch(value)
