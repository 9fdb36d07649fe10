//! What both ends of a connection share: a queue of frames to be written, and bounded reading.
//!
//! Sending never blocks: a thread of the connection writes. It sleeps while nothing is queued.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use peerlane_hal::Deadline;

use super::frame::Frame;

/// How long a peer may take no byte once its connection is being closed.
const STALL_MAX: Duration = Duration::from_millis(500);

/// Queued frames are written together up to about this size.
const BATCH_BYTES: usize = 64 << 10;

/// The sending end of a connection. Dropping it writes what is queued, as long as the peer takes
/// it, and closes the connection in both directions.
pub(super) struct Outbox {
    post: Post,
    closing: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
}

/// A way into an [`Outbox`] that does not keep it open.
#[derive(Clone)]
pub(super) struct Post(Sender<Item>);

enum Item {
    Frame(Frame),
    End,
}

impl Outbox {
    pub(super) fn open(stream: &TcpStream) -> io::Result<Self> {
        let stream = stream.try_clone()?;
        stream.set_write_timeout(Some(STALL_MAX))?;
        let closing = Arc::new(AtomicBool::new(false));
        let (sender, queue) = channel();
        let writer = {
            let closing = Arc::clone(&closing);
            thread::Builder::new().name("peerlane-tcp-write".into()).spawn(move || {
                // A peer that is gone shows at the reading end.
                let _ = write(&stream, &queue, &closing);
                let _ = stream.shutdown(Shutdown::Both);
            })?
        };
        Ok(Self { post: Post(sender), closing, writer: Some(writer) })
    }

    pub(super) fn post(&self) -> &Post {
        &self.post
    }

    /// Begins to close; the drop then only waits for what is left.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        let _ = self.post.0.send(Item::End);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.close();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Post {
    /// Queues a frame; for a connection that is closed it is for nobody.
    pub(super) fn send(&self, frame: Frame) {
        let _ = self.0.send(Item::Frame(frame));
    }
}

fn write(mut stream: &TcpStream, queue: &Receiver<Item>, closing: &AtomicBool) -> io::Result<()> {
    let mut batch = Vec::new();
    while let Ok(Item::Frame(frame)) = queue.recv() {
        batch.extend_from_slice(&frame);
        let mut ended = false;
        while batch.len() < BATCH_BYTES && !ended {
            match queue.try_recv() {
                Ok(Item::Frame(frame)) => batch.extend_from_slice(&frame),
                Ok(Item::End) => ended = true,
                Err(_) => break,
            }
        }
        write_batch(&mut stream, &batch, closing)?;
        if ended {
            break;
        }
        batch.clear();
        batch.shrink_to(BATCH_BYTES);
    }
    Ok(())
}

fn write_batch(stream: &mut impl Write, batch: &[u8], closing: &AtomicBool) -> io::Result<()> {
    let mut rest = batch;
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A peer that is stopped, in a debugger say, is waited for until somebody gives up.
            Err(error) if is_timeout(&error) && !closing.load(Ordering::Relaxed) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads from a stream until a deadline, however slowly bytes drip.
pub(super) struct Bounded<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) deadline: Deadline,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let remaining = self.deadline.remaining();
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(remaining))?;
        (&mut &*self.stream).read(buffer)
    }
}

/// Whether a read or write was cut off by its timeout; systems call that one or the other.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
