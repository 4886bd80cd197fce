"""Made requests, and the loop's mailbox as sessions and the router see it."""

from __future__ import annotations

from routing.mailboxes import Mailbox, Receiver, Sender
from routing.messages import Request, Sampling, ToDrafter


def made_request(session: int, max_tokens: int = 4) -> Request:
    return Request(session, prompt=(1, 2, 3), max_tokens=max_tokens, sampling=Sampling())


def drafter_mail(
    places: int,
) -> tuple[Mailbox[ToDrafter], Sender[ToDrafter], Receiver[ToDrafter]]:
    """A sealed drafter mailbox with the router's end and the drafter's."""
    mailbox = Mailbox[ToDrafter]("drafter", places)
    sender, receiver = mailbox.sender(), mailbox.receiver()
    mailbox.seal()
    return mailbox, sender, receiver
