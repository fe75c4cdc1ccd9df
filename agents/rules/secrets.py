"""What must not leave the node in a log excerpt. Pure."""

import re

_SECRETS = re.compile(
    r"(?P<name>(?:authorization:\s*)?bearer\s+|(?:api[_-]?key|secret|token|passw(?:or)?d|access[_-]?key\w*)[\"']?\s*[=:]\s*[\"']?)"
    r"(?P<value>[^\s\"',;&]{6,})"
    r"|(?P<known>\b(?:hf_|sk-|ghp_|glpat-|LTAI|AKIA)[A-Za-z0-9_-]{8,})"
    r"|(?P<user>\w+://[^\s:/@]+:)(?P<password>[^\s@/]+)(?=@)",
    re.IGNORECASE,
)
HIDDEN = "***"


def scrub(line: str) -> str:
    """The line with secrets replaced by ***."""
    return _SECRETS.sub(lambda found: (found["name"] or found["user"] or "") + HIDDEN, line)
