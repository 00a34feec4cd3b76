"""`stepwell tokens`: create, list, set (quotas), revoke, and audit: who did what."""

from __future__ import annotations

import argparse
import re

from stepwell import terminal
from stepwell.client import Client
from stepwell.messages import Token

ABOUT = """\
Create, list and revoke tokens, and read the audit log. It needs a token with the scope admin.

A service without tokens accepts connections of its own machine only. After the first token every
caller needs one, so the first one should have the scope admin."""
EXAMPLES = """\
  stepwell tokens create me admin
  stepwell tokens create robot-7 ingest:kitchen play:kitchen-* --days 30
  stepwell tokens create cheap ingest --bytes-per-day 10G --requests-per-minute 600
  stepwell tokens create trainer read train sql
  stepwell tokens list
  stepwell tokens set TOKEN_ID --bytes-per-day 20G --requests-per-minute none
  stepwell tokens revoke tk_…
  stepwell tokens audit"""
SCOPES = (
    "read, sql, train, admin, ingest or ingest:DATASET, play or play:RUN (with * for any"
    " characters); docs/reference/maintenance.md#tokens"
)
DAY = 86400.0


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("tokens", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    create = terminal.add_action(
        actions, "create", create_token, "make one; prints its secret once"
    )
    create.add_argument("name", help="whose it is")
    create.add_argument("scopes", nargs="+", metavar="SCOPE", help=SCOPES)
    create.add_argument("--days", type=float, help="until it expires (default: never)")
    terminal.add_action(actions, "list", list_tokens, "all tokens, without secrets")
    change = terminal.add_action(actions, "set", change_token, "change the quotas of a token")
    change.add_argument("id")
    for sub, default in ((create, None), (change, argparse.SUPPRESS)):
        sub.add_argument("--bytes-per-day", type=quota, metavar="N", default=default,
            help="quota of bytes that it may send, such as 10G; none takes it away")  # fmt: skip
        sub.add_argument("--requests-per-minute", type=quota, metavar="N", default=default,
            help="quota of requests; none takes it away")  # fmt: skip
    revoke = terminal.add_action(actions, "revoke", revoke_token, "make a token invalid")
    revoke.add_argument("id")
    log = terminal.add_action(actions, "audit", show_audit, "who changed what, newest first")
    log.add_argument("--limit", type=int, default=100, help="at most so many (default 100)")
    return terminal.dispatch(parser, argv)


def quota(text: str) -> int | None:
    """A whole number, with k, M, G or T behind it; None for "none"."""
    found = re.fullmatch(r"([0-9]+)([kMGT]?)B?", text)
    if text != "none" and found is None:
        raise argparse.ArgumentTypeError(f"expected a number such as 600 or 10G, got {text!r}")
    return None if found is None else int(found[1]) * 1000 ** " kMGT".index(found[2] or " ")


def create_token(client: Client, args: argparse.Namespace) -> terminal.Answer:
    seconds = None if args.days is None else args.days * DAY
    made = client.create_token(
        args.name,
        args.scopes,
        seconds,
        bytes_per_day=args.bytes_per_day,
        requests_per_minute=args.requests_per_minute,
    )
    shown = f"{made.token}\n\nThis is shown once. Use it as STEPWELL_TOKEN or --token."
    return made, lambda: print(shown)


def list_tokens(client: Client, _: argparse.Namespace) -> terminal.Answer:
    tokens = client.tokens()
    return tokens, lambda: terminal.print_table(
        ["token", "name", "scopes", "quotas", "created", "last used", "expires"],
        [
            (
                t.id,
                t.name,
                t.scopes,
                _quotas(t),
                terminal.ago(t.created_at),
                "never" if t.last_used_at is None else terminal.ago(t.last_used_at),
                "never" if t.expires_at is None else terminal.moment(t.expires_at),
            )
            for t in tokens
        ],
        empty="no tokens: the service accepts connections of its own machine only",
    )


def _quotas(token: Token) -> str:
    sent, asked = token.bytes_per_day, token.requests_per_minute
    parts = [f"{terminal.size(sent)}/day" if sent else "", f"{asked}/min" if asked else ""]
    return ", ".join(filter(None, parts)) or "-"


def change_token(client: Client, args: argparse.Namespace) -> terminal.Answer:
    names = ("bytes_per_day", "requests_per_minute")
    changed = client.change_token(
        args.id, **{name: getattr(args, name) for name in names if name in args}
    )
    return changed, lambda: terminal.print_fields(
        [(name.replace("_", " "), getattr(changed, name) or "no quota") for name in names]
    )


def revoke_token(client: Client, args: argparse.Namespace) -> terminal.Answer:
    client.revoke_token(args.id)
    return {"revoked": args.id}, lambda: print(f"revoked {terminal.printable(args.id)}")


def show_audit(client: Client, args: argparse.Namespace) -> terminal.Answer:
    page = client.audit(limit=args.limit)
    return page, lambda: terminal.print_table(
        ["when", "who", "action", "subject", "times", "detail"],
        [
            (terminal.moment(e.until or e.time), e.who, e.action, e.subject, e.count, str(e.detail))
            for e in page.items
        ],
        empty="nothing was changed",
    )
