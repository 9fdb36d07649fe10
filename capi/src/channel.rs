//! Channels: puts, gets and signals between any two ranks, from the host or on a stream.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use peerlane::group::{SharedWait, StreamMessages};
use peerlane::hal::BackendId;
use peerlane::{Channel, Error, Group, Rank};

use crate::group::{GROUPS, GroupHandle};
use crate::handle::{Table, clear, lock};
use crate::milliseconds;
use crate::status::{Failure, Status, call};
use crate::window::{WINDOWS, WindowHandle};

/// Connections over a window to all ranks of a group.
#[derive(Debug)]
pub struct ChannelHandle(());

/// How long a call that waits uses the channel before it lets the call of another thread in.
const TURN: Duration = Duration::from_millis(2);

struct ChannelObject {
    /// `None` after the channel was destroyed, for which calls in progress are waited for.
    channel: RwLock<Option<Mutex<Channel<u8>>>>,
    /// A thread has it while it waits for the channel. So a thread that uses the channel by turns lets the others in first.
    next: Mutex<()>,
    /// The number of threads that wait for the channel.
    waiting: AtomicU32,
    backend: BackendId,
}

static CHANNELS: Table<ChannelObject> = Table::new("channel", 5);

impl ChannelObject {
    /// Locks the channel, so that calls of several threads take turns.
    fn with<R>(
        &self,
        body: impl FnOnce(&mut Channel<u8>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let channel = self.channel.read().unwrap_or_else(PoisonError::into_inner);
        body(&mut *self.turn(channel.as_ref())?)
    }

    /// Waits for a signal of a peer, or for all messages of this rank, in turns. A turn ends if another thread waits for the channel.
    fn wait_in_turns(
        &self,
        signal: Option<(Rank, usize)>,
        timeout: Duration,
    ) -> Result<(), Failure> {
        let wait = SharedWait::for_messages(timeout, TURN, &self.waiting);
        let mut wait = match signal {
            Some((peer, signal)) => wait.signal(peer, signal),
            None => wait,
        };

        let channel = self.channel.read().unwrap_or_else(PoisonError::into_inner);
        while !self.turn(channel.as_ref())?.wait_for_turn(&mut wait)? {}
        Ok(())
    }

    /// Locks the channel after the thread that has waited for it before.
    fn turn<'c>(
        &self,
        channel: Option<&'c Mutex<Channel<u8>>>,
    ) -> Result<MutexGuard<'c, Channel<u8>>, Failure> {
        let destroyed = || Failure::argument("the channel has been destroyed by another thread");
        let channel = channel.ok_or_else(destroyed)?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let next = lock(&self.next);
        let turn = lock(channel);
        drop(next);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(turn)
    }
}

/// Runs `on_host` if the stream is NULL, and otherwise `on_stream`.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank, as for `peerlane_operation_start_on`.
unsafe fn send(
    handle: *const ChannelHandle,
    stream: *mut c_void,
    on_host: impl FnOnce(&mut Channel<u8>) -> Result<(), Error>,
    on_stream: impl FnOnce(&mut StreamMessages<'_, u8>) -> Result<(), Error>,
) -> Status {
    call(|| {
        let object = CHANNELS.get(handle.addr())?;
        object.with(|channel| {
            if stream.is_null() {
                return Ok(on_host(channel)?);
            }
            match object.backend {
                BackendId::CUDA => {
                    // SAFETY: the contract of this function says that it is a stream of this rank's device, and lives long enough.
                    let stream = unsafe { peerlane::cuda::Stream::from_raw(stream) };
                    Ok(channel.on_stream(&stream, on_stream)?)
                }
                BackendId::ROCM => {
                    // SAFETY: the contract of this function says that it is a stream of this rank's device, and lives long enough.
                    let stream = unsafe { peerlane::rocm::Stream::from_raw(stream) };
                    Ok(channel.on_stream(&stream, on_stream)?)
                }
                backend => Err(Failure::argument(format!(
                    "the group is on the backend {backend}, which has no streams; expected NULL"
                ))),
            }
        })
    })
}

fn range(begin: usize, bytes: usize) -> Range<usize> {
    begin..begin.saturating_add(bytes)
}

/// Opens a channel over a window, with `signals` signals from every rank to every rank. Collective.
///
/// Several threads can use a channel. Their calls take turns, and a wait or a flush of the host lets the calls of other threads in after
/// 2 milliseconds; a channel for each thread is faster.
///
/// Places in the window are in bytes. Where a function has a `stream`, NULL means the host, and a stream is as for
/// `peerlane_operation_start_on`. On a stream that is captured, messages are recorded into the graph. All replays of such graphs must be
/// complete before the channel is destroyed, or its group is closed or destroyed.
///
/// # Safety
/// `channel` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_open(
    group: *mut GroupHandle,
    window: *const WindowHandle,
    signals: usize,
    channel: *mut *mut ChannelHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `channel` is NULL or points to a handle.
        let cleared = unsafe { clear(channel, "channel") };
        let window = |_: &Group| {
            cleared?;
            WINDOWS.get(window.addr())?.with(|window| Ok(window.cast::<u8>()))
        };
        let object = GROUPS.get(group.addr())?.collective(window, |group, window| {
            let opened = group.channel(&window, signals)?;
            // SAFETY: the header says at `peerlane_channel_open` when the replays of a C program must be complete.
            let channel = RwLock::new(Some(Mutex::new(unsafe { opened.capturable() })));
            Ok(ChannelObject {
                channel,
                next: Mutex::default(),
                waiting: AtomicU32::new(0),
                backend: group.selection().local,
            })
        })?;
        // SAFETY: the contract of this function says that `channel` points to a handle; NULL has been refused.
        unsafe { CHANNELS.store_into(object, channel) }
    })
}

/// Copies `bytes` bytes from place `from` of this rank's window to place `to` of the window of `peer`.
///
/// The source must not change until `peerlane_channel_flush`, or until the work on the stream has passed.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_put(
    channel: *mut ChannelHandle,
    stream: *mut c_void,
    peer: u32,
    from: usize,
    bytes: usize,
    to: usize,
) -> Status {
    let (peer, from) = (Rank(peer), range(from, bytes));
    let of_stream = from.clone();
    // SAFETY: the contract of this function is the same for the stream.
    unsafe {
        send(
            channel,
            stream,
            |host| host.put(peer, from, to).map(drop),
            |queue| queue.put(peer, of_stream, to),
        )
    }
}

/// Copies as `peerlane_channel_put`, and then gives the peer a signal: when its wait returns, the bytes have arrived.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_put_signal(
    channel: *mut ChannelHandle,
    stream: *mut c_void,
    peer: u32,
    from: usize,
    bytes: usize,
    to: usize,
    signal: usize,
) -> Status {
    let (peer, from) = (Rank(peer), range(from, bytes));
    let of_stream = from.clone();
    // SAFETY: the contract of this function is the same for the stream.
    unsafe {
        send(
            channel,
            stream,
            |host| host.put_signal(peer, from, to, signal).map(drop),
            |queue| queue.put_signal(peer, of_stream, to, signal),
        )
    }
}

/// Copies `bytes` bytes from place `from` of the window of `peer` to place `to` of this rank's window. They have arrived after
/// `peerlane_channel_flush`, or for later work on the stream.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_get(
    channel: *mut ChannelHandle,
    stream: *mut c_void,
    peer: u32,
    from: usize,
    bytes: usize,
    to: usize,
) -> Status {
    let (peer, to) = (Rank(peer), range(to, bytes));
    let of_stream = to.clone();
    // SAFETY: the contract of this function is the same for the stream.
    unsafe {
        send(
            channel,
            stream,
            |host| host.get(peer, from, to).map(drop),
            |queue| queue.get(peer, from, of_stream),
        )
    }
}

/// Gives a peer a signal, after all earlier puts to it and gets from it.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_signal(
    channel: *mut ChannelHandle,
    stream: *mut c_void,
    peer: u32,
    signal: usize,
) -> Status {
    let peer = Rank(peer);
    // SAFETY: the contract of this function is the same for the stream.
    unsafe {
        send(
            channel,
            stream,
            |host| host.signal(peer, signal).map(drop),
            |queue| queue.signal(peer, signal),
        )
    }
}

/// Waits until a peer has given a signal once more than this rank has waited for, at most `timeout_ms` milliseconds on the host: 0 looks once.
/// On a stream, the later work waits, and the timeout is that of the group.
///
/// # Safety
/// `stream` is NULL or a stream of the device of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_channel_wait(
    channel: *mut ChannelHandle,
    stream: *mut c_void,
    peer: u32,
    signal: usize,
    timeout_ms: u64,
) -> Status {
    let peer = Rank(peer);
    if stream.is_null() {
        return call(|| {
            let object = CHANNELS.get(channel.addr())?;
            object.wait_in_turns(Some((peer, signal)), milliseconds("timeout_ms", timeout_ms)?)
        });
    }
    // SAFETY: the contract of this function is the same for the stream.
    unsafe { send(channel, stream, |_| Ok(()), |queue| queue.wait(peer, signal)) }
}

/// Waits until all puts and gets of this rank from the host are complete, at most `timeout_ms` milliseconds.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_channel_flush(channel: *mut ChannelHandle, timeout_ms: u64) -> Status {
    call(|| {
        let object = CHANNELS.get(channel.addr())?;
        object.wait_in_turns(None, milliseconds("timeout_ms", timeout_ms)?)
    })
}

/// Destroys a channel. If a call of another thread uses it, such as a wait, this call first waits for that one.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_channel_destroy(channel: *mut ChannelHandle) -> Status {
    call(|| {
        let object = CHANNELS.remove(channel.addr())?;
        drop(object.channel.write().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    })
}
