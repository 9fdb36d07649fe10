//! Encodes messages as frames of a TCP connection, and reads and writes these frames.
//!
//! A frame is a length of four bytes, little endian, and as many bytes of postcard. The length is
//! not trusted: a length above the limit is an error, and below the limit memory grows only as
//! bytes arrive.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_hal::Deadline;
use peerlane_toolkit::limits::{self, SystemError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::sockopt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::forks::{Generation, Uninherited};
use super::super::message;
use super::super::meter::Charge;
use super::super::process::Process;

/// The maximum length of a frame from a rank, in bytes, without its length field.
pub(super) const REQUEST_BYTES_MAX: u32 = message::REQUEST_BYTES_MAX as u32;

/// The maximum length of a frame from the hub, in bytes, without its length field.
pub(super) const REPLY_BYTES_MAX: u32 = message::REPLY_BYTES_MAX as u32;

/// Holds an encoded message, which can be queued for several connections.
#[derive(Clone)]
pub(super) struct Frame {
    bytes: Arc<[u8]>,
    /// Charges the frame to the rank that has sent its data, instead of the rank that reads the
    /// frame.
    charge: Option<Arc<Charge>>,
}

/// A shared TCP connection that forked children do not keep open.
pub(super) type Stream = Arc<Uninherited<TcpStream>>;

const LENGTH_BYTES: usize = size_of::<u32>();

/// Tells why no frame could be read.
#[derive(Debug)]
pub(super) enum FrameError {
    Io(io::Error),
    TooLong { bytes: u32, bytes_max: u32 },
    Truncated { bytes: usize, expected: usize },
    Malformed,
}

impl FrameError {
    /// Returns whether the frame could not be read because the other end is gone.
    ///
    /// A process that is killed while it has not read everything resets its connections, and one
    /// that is killed while it writes leaves a part of a frame.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::Io(error) => has_closed(error),
            Self::Truncated { .. } => true,
            Self::TooLong { .. } | Self::Malformed => false,
        }
    }
}

/// Returns whether a call on a connection failed because the other end is gone.
pub(super) fn has_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// Encodes a message as a frame.
///
/// The caller must have limited the length of its variable fields.
pub(super) fn encode_frame<T: Serialize>(value: &T) -> Frame {
    // The length comes first but is known last, so its place is kept free.
    let mut bytes = postcard::to_extend(value, vec![0; LENGTH_BYTES])
        .expect("messages consist of types that postcard can encode");
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).expect("blobs and labels are limited");
    bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());

    Frame { bytes: bytes.into(), charge: None }
}

impl Frame {
    /// Returns the frame charged to the rank of `charge`, if any, instead of the rank that reads
    /// the frame.
    pub(super) fn charged_to(self, charge: Option<&Arc<Charge>>) -> Self {
        Self { charge: charge.cloned(), ..self }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns how many bytes the frame counts for in the queue of the rank that reads it.
    pub(super) fn kept_bytes(&self) -> usize {
        if self.charge.is_some() { 0 } else { self.bytes.len() + FRAME_BYTES }
    }
}

/// Reads and decodes one frame, or returns `None` if the connection ended before the frame.
pub(super) fn read_frame<T: DeserializeOwned>(
    stream: &mut impl Read,
    bytes_max: u32,
) -> Result<Option<T>, FrameError> {
    let header = take(stream, LENGTH_BYTES)?;
    if header.is_empty() {
        return Ok(None);
    }

    let length = header.try_into().map_err(|short: Vec<u8>| FrameError::Truncated {
        bytes: short.len(),
        expected: LENGTH_BYTES,
    })?;
    let bytes = u32::from_le_bytes(length);
    if bytes > bytes_max {
        return Err(FrameError::TooLong { bytes, bytes_max });
    }

    let expected = bytes as usize;
    let body = take(stream, expected)?;
    if body.len() < expected {
        return Err(FrameError::Truncated { bytes: body.len(), expected });
    }

    match postcard::take_from_bytes(&body) {
        Ok((value, [])) => Ok(Some(value)),
        _ => Err(FrameError::Malformed),
    }
}

/// Reads and returns `bytes` bytes, or fewer if the stream ends.
fn take(stream: &mut impl Read, bytes: usize) -> Result<Vec<u8>, FrameError> {
    let mut taken = Vec::new();
    while taken.len() < bytes {
        // The memory begins small and at most doubles with each part, so a peer that announces much
        // and sends little costs little memory. All parts together never exceed `bytes`.
        let part = taken.len().max(PART_BYTES).min(bytes - taken.len());
        taken.reserve_exact(part);

        let begin = taken.len();
        stream.take(part as u64).read_to_end(&mut taken).map_err(FrameError::Io)?;
        if taken.len() - begin < part {
            break;
        }
    }

    Ok(taken)
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            // The rest of such a frame is not read, so the text speaks of the header only.
            Self::TooLong { bytes, bytes_max } => {
                write!(
                    f,
                    "received the header of a frame of {bytes} bytes, expected at most {bytes_max} \
                     bytes"
                )
            }
            Self::Truncated { bytes, expected } => {
                write!(f, "the connection closed inside a frame, after {bytes} of {expected} bytes")
            }
            Self::Malformed => {
                f.write_str("received a frame that is not a message of this protocol")
            }
        }
    }
}

/// The time after which a host that does not answer counts as gone.
pub(super) const HOST_GONE: Duration = Duration::from_secs(20);

/// How long the last messages of a process that has ended may take to arrive.
const LAST_WORDS_MAX: Duration = Duration::from_millis(50);

/// The time after which a write that makes no progress on a closing connection fails.
const STALL_MAX: Duration = Duration::from_millis(500);

/// The initial size of the buffer for a frame that is read, in bytes.
const PART_BYTES: usize = 4096;

/// The size of the kernel's send buffer for a connection, in bytes.
const SEND_BUFFER_BYTES: usize = 256 << 10;

/// The number of bytes that is counted for each queued frame in addition to its own bytes.
const FRAME_BYTES: usize = 64;

/// The size, in bytes, up to which queued frames are combined into one write.
const BATCH_BYTES: usize = 64 << 10;

/// Writes frames to a TCP connection on a thread of its own, so that sending never blocks.
///
/// The thread sleeps while nothing is queued. Dropping the queue writes what is queued, as long as
/// the peer reads, and closes the connection in both directions.
///
/// A peer that does not read can be stopped, so the queue has a limit: [`OUTBOX_BYTES_MAX`].
pub(super) struct Outbox {
    sender: FrameSender,
    closing: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
    generation: Generation,
}

/// Queues frames for the thread of an [`Outbox`].
#[derive(Clone)]
pub(super) struct FrameSender {
    queue: Sender<Item>,
    queued_bytes: Arc<AtomicUsize>,
    /// The size, in bytes, of the newest exchange result, which does not count towards the limit.
    ///
    /// The result may take a slow connection seconds.
    result_bytes: Arc<AtomicUsize>,
}

enum Item {
    Frame(Frame),
    End,
}

/// The maximum number of bytes that may be queued for one rank before it counts as not reading.
///
/// A rank that does not read takes part in no further exchange, so at most one result waits for it.
/// The newest result is not counted, because it can have more bytes and take long to arrive.
/// Messages of other ranks count for these ranks.
const OUTBOX_BYTES_MAX: usize = 16 << 20;

impl Outbox {
    /// Creates an outbox for the connection, and starts the thread that writes its queued frames.
    pub(super) fn open(stream: &Stream) -> Result<Self, SystemError> {
        // What the kernel has taken counts for nobody, so it must not be much.
        sockopt::set_socket_send_buffer_size(&***stream, SEND_BUFFER_BYTES)
            .map_err(|errno| SystemError::new("cannot set the size of a send buffer", errno))?;

        let (queue, queued) = channel();
        let closing = Arc::new(AtomicBool::new(false));
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let writer = {
            let stream = Arc::clone(stream);
            let closing = Arc::clone(&closing);
            let queued_bytes = Arc::clone(&queued_bytes);
            limits::spawn("peerlane-tcp-write", move || {
                // The reading side reports a lost connection.
                let _ = write(&stream, &queued, &queued_bytes, &closing);
                let _ = stream.shutdown(Shutdown::Both);
            })?
        };

        let sender = FrameSender { queue, queued_bytes, result_bytes: Arc::default() };
        Ok(Self { sender, closing, writer: Some(writer), generation: Generation::now() })
    }

    pub(super) fn sender(&self) -> &FrameSender {
        &self.sender
    }

    /// Begins to close the connection, so that a later drop only waits until the queue is written.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);

        // The queue has no reader if the connection failed, and then there is nothing to end.
        let _ = self.sender.queue.send(Item::End);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        // The thread does not exist in a forked child.
        if self.generation.is_past() {
            return;
        }

        self.close();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl FrameSender {
    /// Returns whether so many bytes are queued that the other end does not seem to read.
    pub(super) fn is_full(&self) -> bool {
        let result = self.result_bytes.load(Ordering::Relaxed);
        self.queued_bytes.load(Ordering::Relaxed) > OUTBOX_BYTES_MAX + result
    }

    /// Stores the size of the next exchange result, which may wait in addition to the limit.
    pub(super) fn note_result(&self, bytes: usize) {
        self.result_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Queues a frame to be written.
    ///
    /// A frame for a closed connection is dropped.
    pub(super) fn send(&self, frame: Frame) {
        // The count grows first, because the thread that writes may subtract the frame at once.
        self.queued_bytes.fetch_add(frame.kept_bytes(), Ordering::Relaxed);
        let _ = self.queue.send(Item::Frame(frame));
    }

    /// Returns the text that says why a rank that does not read its connection is lost.
    pub(super) fn full_text(&self) -> String {
        let bytes = self.queued_bytes.load(Ordering::Relaxed);
        format!(
            "it did not read {bytes} bytes that were sent to it, expected at most {OUTBOX_BYTES_MAX}"
        )
    }
}

/// Writes queued frames until the end of the queue, or until the connection fails.
fn write(
    stream: &Stream,
    queued: &Receiver<Item>,
    queued_bytes: &AtomicUsize,
    closing: &AtomicBool,
) -> io::Result<()> {
    let mut batch = Vec::new();
    // A frame counts for a rank until it is dropped, so it is kept until it is written.
    let mut frames = Vec::new();
    while let Ok(Item::Frame(frame)) = queued.recv() {
        // A large frame is not worth a copy into the batch.
        if frame.bytes.len() >= BATCH_BYTES {
            write_batch(stream, &frame.bytes, closing)?;
            queued_bytes.fetch_sub(frame.kept_bytes(), Ordering::Relaxed);
            continue;
        }

        batch.extend_from_slice(&frame.bytes);
        frames.push(frame);
        let mut ended = false;
        while batch.len() < BATCH_BYTES && !ended {
            match queued.try_recv() {
                Ok(Item::Frame(frame)) => {
                    batch.extend_from_slice(&frame.bytes);
                    frames.push(frame);
                }
                Ok(Item::End) => ended = true,
                Err(_) => break,
            }
        }

        write_batch(stream, &batch, closing)?;
        let written = frames.drain(..).map(|frame| frame.kept_bytes()).sum();
        queued_bytes.fetch_sub(written, Ordering::Relaxed);

        if ended {
            break;
        }

        // The last frame of a batch can be large, so memory beyond the usual size is released.
        batch.clear();
        batch.shrink_to(BATCH_BYTES);
    }

    Ok(())
}

/// Writes all bytes of `batch`, and waits for the other end to read them unless the connection is
/// closing.
fn write_batch(mut stream: &TcpStream, batch: &[u8], closing: &AtomicBool) -> io::Result<()> {
    let mut rest = batch;
    while !rest.is_empty() {
        let written = Deadline::after(STALL_MAX).retry_interrupted(|timeout| {
            stream.set_write_timeout(Some(timeout))?;
            stream.write(rest)
        });
        match written {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            // A peer can be stopped, for example in a debugger, and read again later.
            Err(error) if is_timeout(&error) && !closing.load(Ordering::Relaxed) => {}
            Err(error) => return Err(error),
        }
    }

    Ok(())
}

/// Reads from a connection until it closes or the process at the other end has ended.
pub(super) struct PeerReader {
    pub(super) stream: Stream,
    /// The process at the other end, if it is on this host.
    pub(super) process: Option<Process>,
}

impl PeerReader {
    /// Waits until the connection can be read or the other process has ended, and returns whether
    /// it can be read.
    ///
    /// It cannot if the process has ended and a child of it keeps the connection open.
    fn wait(&self) -> io::Result<bool> {
        let Some(process) = &self.process else { return Ok(true) };

        let ends = [self.stream.as_fd(), process.as_fd()];
        let mut watched = ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
        retry_on_intr(|| poll(&mut watched, None))?;
        if !watched[0].revents().is_empty() {
            return Ok(true);
        }

        // The process has ended, but what it has sent last may still be on its way.
        let mut last = [PollFd::new(&**self.stream, PollFlags::IN)];
        let limit = Timespec { tv_sec: 0, tv_nsec: LAST_WORDS_MAX.subsec_nanos().into() };
        Ok(retry_on_intr(|| poll(&mut last, Some(&limit)))? > 0)
    }
}

impl Read for PeerReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.wait()? {
            return (&**self.stream).read(buffer);
        }

        let pid = self.process.as_ref().map_or(0, Process::pid);
        let text =
            format!("its process {pid} has ended, but a child of it keeps the connection open");
        Err(io::Error::other(text))
    }
}

/// Reads from a connection until a deadline, however slowly bytes arrive.
pub(super) struct DeadlineReader<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) deadline: Deadline,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // A read timeout of zero would be an error of another kind.
        let remaining = self.deadline.remaining();
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }

        self.stream.set_read_timeout(Some(remaining))?;
        (&mut &*self.stream).read(buffer)
    }
}

/// Enables TCP keepalive, so that the kernel closes the connection if the other host stops
/// answering.
///
/// Without these options the connection to a host that has lost its power stays open for hours.
pub(super) fn keep_alive(stream: &TcpStream, peer: IpAddr) {
    if peer.to_canonical().is_loopback() {
        return;
    }

    // Errors are ignored: every Linux has these options, and without them the deadlines of calls
    // notice a host that is gone.
    //
    // The first probe comes after half of the time. It and the next four are a tenth apart, and the
    // connection closes a tenth after the last.
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, HOST_GONE / 2);
    let _ = sockopt::set_tcp_keepintvl(stream, HOST_GONE / 10);
    let _ = sockopt::set_tcp_keepcnt(stream, 5);

    // Data that is not acknowledged stops the probes, and has a limit of its own.
    let _ = sockopt::set_tcp_user_timeout(stream, HOST_GONE.as_millis() as u32);
}

/// Returns whether `error` is the timeout of a read or write.
///
/// Systems report it as either of two kinds.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::super::message::{BLOB_BYTES_MAX, Blob, LABEL_BYTES_MAX, Request};
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<Request>, FrameError> {
        read_frame(&mut &bytes[..], REQUEST_BYTES_MAX)
    }

    #[test]
    fn a_connection_that_is_reset_or_ends_in_a_frame_is_closed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.write_all(b"never read").unwrap();
        let (other, _) = listener.accept().unwrap();
        other.peek(&mut [0; 10]).unwrap();
        drop(other);
        let reset = read_frame::<Request>(&mut stream, REQUEST_BYTES_MAX).unwrap_err();
        assert!(
            matches!(&reset, FrameError::Io(error) if error.kind() == io::ErrorKind::ConnectionReset)
        );
        assert!(reset.is_closed());

        assert!(decode(&[1, 0]).unwrap_err().is_closed());
        assert!(!decode(&[1, 0, 0, 0, 255]).unwrap_err().is_closed());
    }

    #[test]
    fn the_longest_request_fits() {
        let (label, blob) = ("l".repeat(LABEL_BYTES_MAX), Blob(vec![7; BLOB_BYTES_MAX]));
        let frame = encode_frame(&Request::Contribute { label, blob });
        assert!(frame.bytes().len() <= LENGTH_BYTES + REQUEST_BYTES_MAX as usize);
        let Ok(Some(Request::Contribute { blob, .. })) = decode(frame.bytes()) else {
            panic!("not a give")
        };
        assert_eq!((blob.0.len(), blob.0.last()), (BLOB_BYTES_MAX, Some(&7)));
    }

    #[test]
    fn every_cut_is_noticed_and_no_change_of_a_byte_panics() {
        let frame = encode_frame(&Request::Contribute { label: "a".into(), blob: Blob(vec![1]) });
        let frame = frame.bytes();
        assert!(matches!(decode(&[]), Ok(None)));
        for cut in 1..frame.len() {
            let error = decode(&frame[..cut]).unwrap_err();
            assert!(matches!(error, FrameError::Truncated { .. }), "cut at {cut}: {error}");
        }
        for at in 0..frame.len() {
            for value in 0..=u8::MAX {
                let mut changed = frame.to_vec();
                changed[at] = value;
                let _ = decode(&changed);
            }
        }
    }

    #[test]
    fn says_what_is_wrong() {
        let text = |bytes: &[u8]| decode(bytes).unwrap_err().to_string();
        assert_snapshot!(text(&[1, 0]), @"the connection closed inside a frame, after 2 of 4 bytes");
        assert_snapshot!(text(&[9, 0, 0, 0, 1, 2]), @"the connection closed inside a frame, after 2 of 9 bytes");
        assert_snapshot!(text(&[255; 8]), @"received the header of a frame of 4294967295 bytes, expected at most 4194304 bytes");
        assert_snapshot!(text(&[1, 0, 0, 0, 99]), @
            "received a frame that is not a message of this protocol");
        // A goodbye with a byte too many.
        assert_snapshot!(text(&[2, 0, 0, 0, 4, 0]), @
            "received a frame that is not a message of this protocol");
    }
}
