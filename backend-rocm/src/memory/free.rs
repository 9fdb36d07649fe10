//! Giving memory back, without waiting for ever.
//!
//! `hipFree` returns when everything is done that streams of the device hold, also a wait for a peer. Of
//! two operations on one device the end of one would then wait for the peers of the other; and where
//! the caller's own next step lets them go on, for ever. So a thread of each device gives memory back,
//! and callers wait for it only as long as that takes on a device where nothing is blocked.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::mechanics::device::DevicePtr;

use crate::sys::hip::{self, hipStreamCaptureMode};

/// How long a caller waits. What is then not given back yet follows when the device allows.
const PATIENCE: Duration = Duration::from_millis(200);

/// An allocation that nobody uses any more.
struct Unused {
    address: DevicePtr,
    /// Told when it is given back.
    done: SyncSender<()>,
}

/// The threads, by the number of their device.
static THREADS: LazyLock<Mutex<HashMap<c_int, Sender<Unused>>>> = LazyLock::new(Mutex::default);

/// Gives an allocation of `hipMalloc` or `hipExtMallocWithFlags` back.
///
/// # Safety
/// It is an allocation of this device, given back once, and nobody uses it.
pub(super) unsafe fn free(calls: &'static hip::Library, device: c_int, address: DevicePtr) {
    let (done, told) = sync_channel(1);
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    if !threads.contains_key(&device) {
        let (sender, unused) = channel();
        let thread = std::thread::Builder::new().name(format!("peerlane free {device}"));
        if thread.spawn(move || give_back(calls, device, &unused)).is_err() {
            drop(threads);
            // SAFETY: the caller's. Without a thread it takes as long as it takes.
            let _ = unsafe { (calls.free)(address as *mut _) };
            return;
        }
        threads.insert(device, sender);
    }
    let sent = threads[&device].send(Unused { address, done });
    drop(threads);
    if sent.is_ok() {
        // The memory follows in any case.
        let _ = told.recv_timeout(PATIENCE);
    }
}

fn give_back(calls: &'static hip::Library, device: c_int, unused: &Receiver<Unused>) {
    // A refusal means that the device is gone, and its memory with it.
    // SAFETY: the number is that of a device.
    let _ = unsafe { (calls.set_device)(device) };
    // Otherwise captures of other threads refuse it.
    let mut mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
    // SAFETY: it swaps the mode of this thread with that in the local.
    let _ = unsafe { (calls.thread_exchange_stream_capture_mode)(&raw mut mode) };
    for Unused { address, done } in unused {
        // SAFETY: by the word of whoever called `free`.
        let _ = unsafe { (calls.free)(address as *mut _) };
        let _ = done.try_send(());
    }
}
