"""Proofs and keys: fixed values, so that two releases that differ cannot think they agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from data_plane.greeting import Greeting, GreetingKind
from data_plane.handshake import ClientHandshake, HelloVerdict, ListenerHandshake
from data_plane.nixl.frame_mac import FrameMac
from data_plane.posted_transfer import CONTROL_CHANNEL, DATA_CHANNEL
from data_plane.proof import (
    ConnectionKeys,
    Ends,
    Transcript,
    client_proof,
    connection_keys,
    derived_key,
    server_proof,
)
from data_plane.transport import AcceptCallback, Claim, ClaimRefused, HandshakeRejected
from data_plane.ucxx.wire_tags import NEWS_CHANNEL, WireTags
from tests.service.data_plane.secret import SECRET, proven

ENDS = Ends(client="10.0.0.1:40000", server="10.0.0.2:7711")
TRANSCRIPT = Transcript(
    server_nonce=bytes(range(32)), client_nonce=bytes(range(32, 64)), ends=ENDS, hello=b"hello"
)


def test_fixed_values() -> None:
    keys = connection_keys(SECRET, TRANSCRIPT)
    assert {
        "digest": TRANSCRIPT.digest.hex(),
        "client": client_proof(SECRET, TRANSCRIPT).hex(),
        "server": server_proof(SECRET, TRANSCRIPT, 2, b"welcome").hex(),
        "to_server": keys.to_server.hex(),
        "to_client": keys.to_client.hex(),
        "derived": derived_key(keys.to_server, "wire tags").hex(),
        "wire": f"{WireTags(keys.to_server).of(DATA_CHANNEL, 7):016x}",
        "frame": FrameMac(keys.to_server).next(b"head", b"payload").hex(),
    } == VECTORS


def test_every_part_of_the_handshake_counts() -> None:
    changed = [
        replace(TRANSCRIPT, server_nonce=bytes(32)),
        replace(TRANSCRIPT, client_nonce=bytes(32)),
        replace(TRANSCRIPT, ends=replace(ENDS, client="10.0.0.1:40001")),
        replace(TRANSCRIPT, ends=replace(ENDS, server="10.0.0.3:7711")),
        replace(TRANSCRIPT, hello=b"hellp"),
        # Moved from one part to the next.
        replace(TRANSCRIPT, ends=replace(ENDS, server=ENDS.server + "h"), hello=b"ello"),
    ]
    for values in (
        [client_proof(SECRET, each) for each in (TRANSCRIPT, *changed)],
        [connection_keys(SECRET, each).to_server for each in (TRANSCRIPT, *changed)],
    ):
        assert len(set(values)) == len(values)


def test_nothing_passes_for_something_else() -> None:
    keys = connection_keys(SECRET, TRANSCRIPT)
    digests = [
        client_proof(SECRET, TRANSCRIPT),
        server_proof(SECRET, TRANSCRIPT, 2, b""),
        server_proof(SECRET, TRANSCRIPT, 3, b""),
        server_proof(bytes(36), TRANSCRIPT, 2, b""),
        keys.to_server,
        keys.to_client,
        derived_key(keys.to_server, "wire tags"),
        derived_key(keys.to_server, "frames"),
    ]
    assert len(set(digests)) == len(digests)


def test_a_wire_tag_tells_direction_channel_and_number() -> None:
    keys = connection_keys(SECRET, TRANSCRIPT)
    wires = [
        WireTags(key).of(channel, number)
        for key in (keys.to_server, keys.to_client)
        for channel in (DATA_CHANNEL, CONTROL_CHANNEL, NEWS_CHANNEL)
        for number in (0, 1, 2**32, 2**63 - 1)
    ]
    assert len(set(wires)) == len(wires)
    assert all(0 <= wire < 2**64 for wire in wires)


def shake(
    accept: AcceptCallback, secret: bytes = SECRET, seen: Ends = ENDS, ends: Ends = ENDS
) -> tuple[HelloVerdict, tuple[ConnectionKeys, bytes]]:
    """A handshake without a network: the listener's verdict, and what the client makes of it."""
    client, listener = ClientHandshake(b"rank 0", secret), ListenerHandshake(seen)
    hello = client.answer(listener.challenge, ends)
    verdict = listener.judge(accept, hello, None)  # type: ignore[arg-type]
    return verdict, client.conclude(verdict.greeting, transport="none", peer="nobody")


def test_both_sides_have_the_same_keys() -> None:
    verdict, (keys, answer) = shake(proven(lambda hello, connection: b"welcome " + hello))
    assert verdict.keys == keys
    assert answer == b"welcome rank 0"


def test_keys_are_new_each_time() -> None:
    assert shake(proven())[0].keys != shake(proven())[0].keys


@pytest.mark.parametrize(
    ("client", "server", "leaves"),
    [
        ("10.0.0.1:40000", "10.0.0.2:7711", True),
        ("10.0.0.1:40000", "10.0.0.1:7711", False),
        ("127.0.0.1:40000", "127.0.1.1:7711", False),
        ("127.0.0.1:40000", "10.0.0.1:7711", True),
        ("", "10.0.0.1:7711", True),
        ("", "", True),
    ],
)
def test_both_ends_agree_whether_messages_leave_the_host(
    client: str, server: str, leaves: bool
) -> None:
    ends = Ends(client=client, server=server)
    # A listener that sees less believes the client, who has proven itself.
    for seen in (ends, Ends(client="", server="")):
        verdict, (keys, _) = shake(proven(), ends=ends, seen=seen)
        assert verdict.keys == keys
        assert keys.leaves_host is leaves


def test_address_translation_is_refused_and_an_unknown_address_is_none() -> None:
    with pytest.raises(HandshakeRejected) as refused:
        shake(proven(), seen=replace(ENDS, server="192.168.0.9:7711"))
    assert refused.value.proven
    assert shake(proven(), seen=Ends(client="", server=ENDS.server))[0].keys is not None


def test_a_refusal_behind_the_proof_is_proven_and_one_before_is_not() -> None:
    def refuse(hello: bytes, connection: object) -> bytes:
        raise ValueError("epoch 1 is over")

    with pytest.raises(HandshakeRejected) as refused:
        shake(proven(refuse))
    assert refused.value.proven
    with pytest.raises(HandshakeRejected) as refused:
        shake(proven(), secret=b"guessed")
    assert not refused.value.proven


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("code", [0, 7, 255])
def test_a_refusal_carries_its_code(checked: bool, code: int) -> None:
    def refuse(claim: Claim, connection: object) -> bytes:
        if checked:
            claim.check(SECRET)
        raise ClaimRefused("größer", code=code)

    with pytest.raises(HandshakeRejected) as refused:
        shake(refuse)
    assert (refused.value.code, refused.value.proven) == (code, checked)


def test_a_refusal_without_a_word_has_no_code() -> None:
    client, listener = ClientHandshake(b"rank 0", SECRET), ListenerHandshake(ENDS)
    client.answer(listener.challenge, ENDS)
    with pytest.raises(HandshakeRejected) as refused:
        client.conclude(
            Greeting(status=GreetingKind.REFUSED, body=b""), transport="none", peer="nobody"
        )
    assert refused.value.code == 0


def test_a_callback_that_checks_nothing_takes_nobody_in() -> None:
    with pytest.raises(HandshakeRejected):
        shake(lambda claim, connection: b"come in")


VECTORS = {
    "digest": "54541413b8a1a17d4c4982a8dd73af2af44e10d83b288668c5c5f520954019d9",
    "client": "792a6ae625f0eeb52067f4c168c2202e9ca0986df2c889df50307bf7adf4c659",
    "server": "ebb18f8a593792d499545511349ad033387a54ecbd2ba0fdcec3cca887713998",
    "to_server": "a9f35f449e91e9f6523f5610f25c813399bcaad97df2d121dc9f1bf68fc14ef0",
    "to_client": "b01f8fa22d1a6c90459d3f19b610f80190d3c0c12228971ae0940e6d78b69f89",
    "derived": "8bfcf16f47fb9fe05dbdaf953d4d307c8c1d6c1e3b5a65434b22a4159f3b5abd",
    "wire": "8c05a419ed8d0547",
    "frame": "ad54b0149367aa3071a8e82dc72a3b0c",
}
