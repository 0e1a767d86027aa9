"""A gRPC channel that takes new certificates into use while it is used.

A channel's credentials cannot change, so this one builds another channel when its files do, and
moves over: new calls go to the new channel at once, calls under way end on the old one, and streams
are opened again on the new one before the old ends. Nothing changes until the new channel has a
connection, so certificates that the other side does not take cost nothing but a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from distca.contract.tls import CertificateFiles, Certificates

logger = logging.getLogger(__name__)

STREAM_SECONDS = 30.0
"""How long a stream may go on on the old channel after it was opened on the new one. The control
plane ends it at once, after what was queued for it."""

_POLL_SECONDS = 0.05


class ReloadingChannel(grpc.Channel):  # type: ignore[misc]
    """See the module. Streams are requests that may be repeated: the other side must be content
    with a second stream of the same request, and their readers with what comes twice.

    Args:
        files: of this side.
        connect: makes a channel of what they hold.
        check_seconds: how often the files are looked at.
        ready_seconds: how long a new channel may take to connect.
    """

    def __init__(
        self,
        files: CertificateFiles,
        connect: Callable[[Certificates], grpc.Channel],
        *,
        check_seconds: float,
        ready_seconds: float,
    ) -> None:
        self._files = files
        self._connect = connect
        self._check_seconds = check_seconds
        self._ready_seconds = ready_seconds
        self._lock = threading.Lock()
        self._generation = _Generation(connect(files.current))
        self._streams: set[_MovingStream] = set()
        self._subscribed: dict[Callable[..., None], grpc.Channel] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._follow_files, name="distca-certificates", daemon=True
        )
        self._thread.start()

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool = False) -> None:
        channel = self._subscribed[callback] = self._generation.channel
        channel.subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        channel = self._subscribed.pop(callback, None)
        if channel is not None:
            channel.unsubscribe(callback)

    def unary_unary(self, *method: Any, **options: Any) -> _UnaryCalls:
        return _UnaryCalls(self, lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., _MovingStream]:
        def call(*arguments: Any, **settings: Any) -> _MovingStream:
            return self._open_stream(
                lambda channel: channel.unary_stream(*method, **options)(*arguments, **settings)
            )

        return call

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        raise NotImplementedError("streams of requests cannot be repeated on another channel")

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        raise NotImplementedError("streams of requests cannot be repeated on another channel")

    def close(self) -> None:
        self._closed.set()
        self._generation.channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _POLL_SECONDS + 1.0)

    def __enter__(self) -> ReloadingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_call(self) -> _Generation:
        """The channel to make a call on; it stays open until the call says that it ended."""
        with self._lock:
            self._generation.begin_call()
            return self._generation

    def _open_stream(self, start: Callable[[grpc.Channel], Any]) -> _MovingStream:
        with self._lock:
            stream = _MovingStream(start, self._generation.channel, self._streams.discard)
            self._streams.add(stream)
            return stream

    def _follow_files(self) -> None:
        waiting: Certificates | None = None
        warned = False
        while not self._closed.wait(self._check_seconds):
            waiting = self._files.changed() or waiting
            if waiting is None:
                continue
            if self._move(waiting):
                waiting, warned = None, False
            elif not warned and not self._closed.is_set():
                warned = True
                logger.warning(
                    "no connection with the new certificates after %g s; going on with the old "
                    "ones, and trying again every %g s",
                    self._ready_seconds,
                    self._check_seconds,
                )

    def _move(self, certificates: Certificates) -> bool:
        """Goes over to a channel with ``certificates``, if it connects."""
        channel = self._connect(certificates)
        if not self._is_ready(channel):
            channel.close()
            return False
        with self._lock:
            old, self._generation = self._generation, _Generation(channel)
            streams = list(self._streams)
        for stream in streams:
            stream.move(channel)
        deadline = time.monotonic() + STREAM_SECONDS
        while not all(stream.moved for stream in streams) and time.monotonic() < deadline:
            if self._closed.wait(_POLL_SECONDS):
                break
        for stream in streams:
            stream.leave_old()
        old.retire()
        if self._closed.is_set():
            channel.close()
        logger.info("new certificates are in use; %d streams moved", len(streams))
        return True

    def _is_ready(self, channel: grpc.Channel) -> bool:
        ready = grpc.channel_ready_future(channel)
        deadline = time.monotonic() + self._ready_seconds
        try:
            while time.monotonic() < deadline and not self._closed.is_set():
                try:
                    ready.result(timeout=_POLL_SECONDS)
                except grpc.FutureTimeoutError:
                    continue
                return True
            return False
        finally:
            ready.cancel()


class _Generation:
    """A channel and how many calls are under way on it; closed after the last, once retired."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False

    def begin_call(self) -> None:
        with self._lock:
            self._calls += 1

    def end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            last = self._retired and not self._calls
        if last:
            self.channel.close()

    def retire(self) -> None:
        with self._lock:
            self._retired = True
            last = not self._calls
        if last:
            self.channel.close()


class _UnaryCalls(grpc.UnaryUnaryMultiCallable):  # type: ignore[misc]
    """A method with one request and one response."""

    def __init__(self, channel: ReloadingChannel, make: Callable[[grpc.Channel], Any]) -> None:
        self._channel = channel
        self._make = make
        self._made: tuple[_Generation | None, Any] = (None, None)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self.with_call(*arguments, **settings)[0]

    def with_call(self, *arguments: Any, **settings: Any) -> Any:
        generation = self._channel.begin_call()
        try:
            return self._on(generation).with_call(*arguments, **settings)
        finally:
            generation.end_call()

    def future(self, *arguments: Any, **settings: Any) -> Any:
        generation = self._channel.begin_call()
        try:
            future = self._on(generation).future(*arguments, **settings)
        except BaseException:
            generation.end_call()
            raise
        future.add_done_callback(lambda _: generation.end_call())
        return future

    def _on(self, generation: _Generation) -> Any:
        made_for, callable_ = self._made
        if made_for is not generation:
            callable_ = self._make(generation.channel)
            self._made = (generation, callable_)
        return callable_


class _MovingStream:
    """The responses to one request, on one channel and then on the next.

    Args:
        start: begins the stream on a channel.
        channel: the first.
        on_ended: called when there is nothing to move any more.
    """

    def __init__(
        self,
        start: Callable[[grpc.Channel], Any],
        channel: grpc.Channel,
        on_ended: Callable[[_MovingStream], None],
    ) -> None:
        self._start = start
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._call = start(channel)
        self._following: Any = None
        self._cancelled = False

    @property
    def moved(self) -> bool:
        """It is read from the channel that it was moved to last."""
        return self._following is None

    def move(self, channel: grpc.Channel) -> None:
        """Begins it on ``channel`` too, which is read once the call before has ended."""
        with self._lock:
            if self._cancelled:
                return
            if self._following is not None:
                self._following.cancel()
            self._following = self._start(channel)

    def leave_old(self) -> None:
        """Ends the call before the move, if it has not ended by itself."""
        with self._lock:
            if self._following is not None:
                self._call.cancel()

    def cancel(self) -> None:
        """Ends it; a blocked reader gets CANCELLED."""
        with self._lock:
            self._cancelled = True
            calls = [call for call in (self._following, self._call) if call is not None]
        self._on_ended(self)
        for call in calls:
            call.cancel()

    def __iter__(self) -> _MovingStream:
        return self

    def __next__(self) -> Any:
        while True:
            call = self._call
            try:
                return next(call)
            except (grpc.RpcError, StopIteration):
                if not self._follow():
                    self._on_ended(self)
                    raise

    def _follow(self) -> bool:
        """Goes on with the next call, if there is one."""
        with self._lock:
            if self._following is None or self._cancelled:
                return False
            self._call, self._following = self._following, None
            return True
