"""`stepwell tokens`: create, list and revoke them; `stepwell tokens audit`: who did what."""

from __future__ import annotations

import argparse

from stepwell.client import Client
from stepwell.commands import common

ABOUT = """\
Create, list and revoke tokens, and read the audit log. It needs a token with the scope admin.

A service without tokens accepts connections of its own machine only. After the first token every
caller needs one, so the first one should have the scope admin."""
EXAMPLES = """\
  stepwell tokens create me admin
  stepwell tokens create robot-7 ingest:kitchen --days 30
  stepwell tokens create trainer read train sql
  stepwell tokens list
  stepwell tokens revoke tk_…
  stepwell tokens audit"""
SCOPES = "read, sql, train, admin, ingest or ingest:DATASET (with * for any characters)"
DAY = 86400.0


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("tokens", ABOUT, EXAMPLES)
    actions = common.subcommands(parser)
    create = common.add_action(actions, "create", create_token, "make one; prints its secret once")
    create.add_argument("name", help="whose it is")
    create.add_argument("scopes", nargs="+", metavar="SCOPE", help=SCOPES)
    create.add_argument("--days", type=float, help="until it expires (default: never)")
    common.add_action(actions, "list", list_tokens, "all tokens, without secrets")
    revoke = common.add_action(actions, "revoke", revoke_token, "make a token invalid")
    revoke.add_argument("id")
    log = common.add_action(
        actions, "audit", show_audit, "deletions, demotions and tokens, newest first"
    )
    log.add_argument("--limit", type=int, default=100, help="at most so many (default 100)")
    return common.dispatch(parser, argv)


def create_token(client: Client, args: argparse.Namespace) -> common.Answer:
    seconds = None if args.days is None else args.days * DAY
    made = client.create_token(args.name, args.scopes, seconds)
    shown = f"{made.token}\n\nThis is shown once. Use it as STEPWELL_TOKEN or --token."
    return made, lambda: print(shown)


def list_tokens(client: Client, _: argparse.Namespace) -> common.Answer:
    tokens = client.tokens()
    return tokens, lambda: common.print_table(
        ["token", "name", "scopes", "created", "last used", "expires"],
        [
            (
                t.id,
                t.name,
                t.scopes,
                common.ago(t.created_at),
                "never" if t.last_used_at is None else common.ago(t.last_used_at),
                "never" if t.expires_at is None else common.moment(t.expires_at),
            )
            for t in tokens
        ],
        empty="no tokens: the service accepts connections of its own machine only",
    )


def revoke_token(client: Client, args: argparse.Namespace) -> common.Answer:
    client.revoke_token(args.id)
    return {"revoked": args.id}, lambda: print(f"revoked {common.printable(args.id)}")


def show_audit(client: Client, args: argparse.Namespace) -> common.Answer:
    page = client.audit(limit=args.limit)
    return page, lambda: common.print_table(
        ["when", "who", "action", "subject", "detail"],
        [(common.moment(e.time), e.who, e.action, e.subject, str(e.detail)) for e in page.items],
        empty="nothing was deleted, demoted, given or revoked",
    )
