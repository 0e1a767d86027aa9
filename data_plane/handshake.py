"""The two sides of a handshake by proof: which greeting follows which, and what each must hold.

No network here; a transport carries the greetings. See ``data_plane.proof`` for what is proven.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from enum import StrEnum

from data_plane.greeting import BadGreeting, Greeting, GreetingKind
from data_plane.proof import (
    NONCE_BYTES,
    PROOF_BYTES,
    ConnectionKeys,
    Ends,
    Transcript,
    client_proof,
    connection_keys,
    new_nonce,
    same,
    server_proof,
)
from data_plane.transport import (
    MAX_HELLO_BYTES,
    AcceptCallback,
    AddressesDiffer,
    ClaimRefused,
    Connection,
    HandshakeRejected,
    ProofFailed,
)

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("!BB")
_MAX_ADDRESS_LETTERS = 64


class HandshakeFailure(StrEnum):
    """The reasons why a listener did not take a client in: the ``cause`` of its metric."""

    TIMEOUT = "timeout"
    """It did not say hello in time, or did not even speak UCX."""
    MALFORMED = "malformed"
    PROOF = "proof"
    """It does not know the secret of what it says it is, or says it is nobody known."""
    ADDRESSES = "addresses"
    REFUSED = "refused"
    """It has proven itself, but cannot be served."""
    LOST = "lost"
    """It went away half-way."""
    NO_ROOM = "no-room"
    """Too many were half-way, most of them of its host, and it was the oldest of those."""


@dataclass(frozen=True, kw_only=True)
class HelloVerdict:
    """A listener's verdict on a hello.

    Attributes:
        greeting: the answer to send.
        keys: of the connection; None if the client is refused.
        failure: why it is refused; None if it is not.
        reason: the same in words.
    """

    greeting: Greeting
    keys: ConnectionKeys | None = None
    failure: HandshakeFailure | None = None
    reason: str = ""


class ListenerHandshake:
    """The listener's side of one handshake.

    Args:
        ends: both addresses, as the listener sees them.

    Attributes:
        challenge: the first greeting.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._nonce = new_nonce()
        self.challenge = Greeting(status=GreetingKind.CHALLENGE, body=self._nonce)

    def judge(
        self, accept: AcceptCallback, greeting: Greeting, connection: Connection
    ) -> HelloVerdict:
        """Asks ``accept`` about the client's answer to the challenge."""
        try:
            claim = _decode_hello(greeting, self._nonce, self._ends)
        except BadGreeting as bad:
            return refusal(HandshakeFailure.MALFORMED, str(bad))
        try:
            answer = accept(claim, connection)
        except ClaimRefused as refused:
            return claim.rejection(str(refused), refused.code)
        except ValueError as error:
            return claim.rejection(str(error))
        except Exception:
            logger.exception("accept callback failed for %s", connection.peer)
            return claim.rejection("internal error of the listener, see its log")
        if len(answer) > MAX_HELLO_BYTES:
            logger.error("accept callback answered %d bytes to %s", len(answer), connection.peer)
            return claim.rejection("the listener's answer is too long")
        return claim.acceptance(answer)


class ClientHandshake:
    """The client's side of one handshake.

    Args:
        hello: who the client is.
        secret: what it proves to know.
    """

    def __init__(self, hello: bytes, secret: bytes) -> None:
        self._hello = hello
        self._secret = secret
        self._transcript: Transcript | None = None

    def answer(self, challenge: Greeting, ends: Ends) -> Greeting:
        """The hello, with its proof.

        Args:
            challenge: the listener's first greeting.
            ends: both addresses, as the client sees them.

        Raises:
            BadGreeting: it is no challenge.
        """
        if challenge.status is not GreetingKind.CHALLENGE or len(challenge.body) != NONCE_BYTES:
            raise BadGreeting(
                f"is {challenge.status.name} of {len(challenge.body)} bytes, not a challenge"
            )
        self._transcript = transcript = Transcript(
            server_nonce=challenge.body, client_nonce=new_nonce(), ends=ends, hello=self._hello
        )
        proof = client_proof(self._secret, transcript)
        client, server = ends.client.encode(), ends.server.encode()
        head = transcript.client_nonce + proof + _LENGTHS.pack(len(client), len(server))
        return Greeting(status=GreetingKind.HELLO, body=head + client + server + self._hello)

    def conclude(
        self, greeting: Greeting, *, transport: str, peer: str
    ) -> tuple[ConnectionKeys, bytes]:
        """The connection's keys and the listener's answer.

        Args:
            greeting: the listener's second one.
            transport, peer: for errors.

        Raises:
            BadGreeting: it is no answer to a hello.
            HandshakeRejected: the listener refuses, or cannot prove itself.
        """
        assert self._transcript is not None
        if greeting.status is GreetingKind.REFUSED:
            code, words = _read_refusal(greeting.body)
            raise HandshakeRejected(
                f"hello refused: {words}", transport=transport, peer=peer, code=code
            )
        if greeting.status not in (GreetingKind.ACCEPTED, GreetingKind.REJECTED):
            raise BadGreeting(f"is {greeting.status.name}, not an answer to a hello")
        proof, answer = greeting.body[:PROOF_BYTES], greeting.body[PROOF_BYTES:]
        expected = server_proof(self._secret, self._transcript, greeting.status, answer)
        if not same(proof, expected):
            raise HandshakeRejected(
                "the listener did not prove that it is one of ours",
                transport=transport,
                peer=peer,
                hint="somebody else answers at this address, or it has another secret",
            )
        if greeting.status is GreetingKind.REJECTED:
            code, words = _read_refusal(answer)
            raise HandshakeRejected(
                f"hello refused: {words}",
                transport=transport,
                peer=peer,
                proven=True,
                code=code,
            )
        return connection_keys(self._secret, self._transcript), answer


class _Claim:
    """Implements ``Claim``."""

    def __init__(self, transcript: Transcript, proof: bytes, seen: Ends) -> None:
        self._transcript = transcript
        self._proof = proof
        self._seen = seen
        self._secret: bytes | None = None
        self._failure = HandshakeFailure.PROOF

    @property
    def hello(self) -> bytes:
        return self._transcript.hello

    def check(self, secret: bytes) -> None:
        if not same(self._proof, client_proof(secret, self._transcript)):
            raise ProofFailed("the proof of the hello is wrong")
        self._secret = secret
        self._failure = HandshakeFailure.REFUSED
        if self._seen.differ(self._transcript.ends):
            self._failure = HandshakeFailure.ADDRESSES
            raise AddressesDiffer(
                f"the client connected {self._transcript.ends}, it arrived {self._seen}: is "
                "address translation in between? Give an address that the server itself has"
            )

    def acceptance(self, answer: bytes) -> HelloVerdict:
        if self._secret is None or self._failure is HandshakeFailure.ADDRESSES:
            logger.error("an accept callback took a client in without a check of its claim")
            return refusal(HandshakeFailure.PROOF, "internal error of the listener, see its log")
        return HelloVerdict(
            greeting=self._proven(GreetingKind.ACCEPTED, answer),
            keys=connection_keys(self._secret, self._transcript),
        )

    def rejection(self, reason: str, code: int = 0) -> HelloVerdict:
        if self._secret is None:
            return refusal(self._failure, reason, code)
        greeting = self._proven(GreetingKind.REJECTED, _write_refusal(reason, code))
        return HelloVerdict(greeting=greeting, failure=self._failure, reason=reason)

    def _proven(self, status: GreetingKind, answer: bytes) -> Greeting:
        assert self._secret is not None
        proof = server_proof(self._secret, self._transcript, status, answer)
        return Greeting(status=status, body=proof + answer)


def refusal(failure: HandshakeFailure, reason: str, code: int = 0) -> HelloVerdict:
    """A verdict on a client that has proven nothing."""
    greeting = Greeting(status=GreetingKind.REFUSED, body=_write_refusal(reason, code))
    return HelloVerdict(greeting=greeting, failure=failure, reason=reason)


def _decode_hello(greeting: Greeting, server_nonce: bytes, seen: Ends) -> _Claim:
    if greeting.status is not GreetingKind.HELLO:
        raise BadGreeting(f"expected a hello, got {greeting.status.name}")
    raw = greeting.body
    begin = NONCE_BYTES + PROOF_BYTES
    if len(raw) < begin + _LENGTHS.size:
        raise BadGreeting(f"the hello has {len(raw)} bytes: no room for nonce and proof")
    client_letters, server_letters = _LENGTHS.unpack_from(raw, begin)
    ends_at = begin + _LENGTHS.size
    hello_at = ends_at + client_letters + server_letters
    if max(client_letters, server_letters) > _MAX_ADDRESS_LETTERS or len(raw) < hello_at:
        raise BadGreeting(f"the hello's addresses have {client_letters}, {server_letters} letters")
    try:
        client = raw[ends_at : ends_at + client_letters].decode("ascii")
        server = raw[ends_at + client_letters : hello_at].decode("ascii")
    except UnicodeDecodeError:
        raise BadGreeting("the hello's addresses are no text") from None
    transcript = Transcript(
        server_nonce=server_nonce,
        client_nonce=raw[:NONCE_BYTES],
        ends=Ends(client=client, server=server),
        hello=raw[hello_at:],
    )
    return _Claim(transcript, raw[NONCE_BYTES:begin], seen)


def _write_refusal(reason: str, code: int) -> bytes:
    return bytes([code]) + reason.encode()[: MAX_HELLO_BYTES - 1]


def _read_refusal(said: bytes) -> tuple[int, str]:
    """The code, 0 if there is none, and the words, fit for a log."""
    text = said[1:].decode(errors="replace")
    return (said[0] if said else 0), "".join(c if c.isprintable() else "?" for c in text)
