"""Taking the secrets out of a config before a backend sees it: by the rules of the log."""

from __future__ import annotations

from eventlog import redaction

REDACTED = redaction.REDACTED
is_secret_name = redaction.is_secret_name
redact_sensitive_config = redaction.redact_sensitive_config
