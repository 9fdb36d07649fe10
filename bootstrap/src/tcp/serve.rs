//! Serves one connection to the hub, from the handshake to the last message of the rank.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};
use peerlane_toolkit::limits::SystemError;

use super::super::hub::Event;
use super::super::message::{Request, Seconds};
use super::super::process::ProcessId;
use super::super::secret::random_bytes;
use super::super::subgroups::Addressed;
use super::handshake::{
    HANDSHAKE_BYTES_MAX, Hello, HelloReply, OpenError, PreambleError, Refusal, Sealed, Side,
    VERSION, preamble, read_preamble,
};
use super::hub::Shared;
use super::wire::{
    DeadlineReader, FrameError, Outbox, PeerReader, REQUEST_BYTES_MAX, Stream, encode_frame,
    has_closed, is_timeout, keep_alive, read_frame,
};

/// How long a connection may take to complete the handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of bytes that the hub reads from a rejected connection.
const REJECT_BYTES: u64 = 64 << 10;

/// How long the hub reads from a rejected connection, or waits for a hello after resources have run
/// out.
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Performs the handshake of a connection, and then applies the requests of its rank until the
/// connection closes.
///
/// A connection that is no rank of this group gets an answer and is closed, without effect on the
/// group. If the hub is `exhausted`, every connection is closed, and a rank that proves that it
/// belongs to the job ends the start.
pub(super) fn serve(
    shared: &Arc<Shared>,
    stream: Stream,
    origin: SocketAddr,
    number: u64,
    exhausted: Option<&SystemError>,
) {
    let (rank, process) = match handshake(shared, &stream, (origin, number), exhausted) {
        Ok(rank) => rank,
        Err(rejection) => {
            shared.count_refused(origin, number, &rejection.reason);
            reject(&stream, &rejection.answer);

            // A connection counts until its descriptor is closed.
            drop(stream);
            shared.forget(number);

            if let Some(rank) = rejection.rank {
                shared.tell(rank);
            }
            return;
        }
    };

    let process = process.and_then(|process| process.find());
    let mut reader = BufReader::new(PeerReader { stream, process });
    let how = loop {
        match read_frame::<Addressed<Request>>(&mut reader, REQUEST_BYTES_MAX) {
            Ok(Some(Addressed { subgroup, message })) => {
                shared.apply(
                    (rank, number),
                    Addressed { subgroup, message: Event::Request(message) },
                );
            }
            Ok(None) => {
                break format!(
                    "its connection from {origin} closed before the rank left the group"
                );
            }
            Err(error) => break format!("its connection from {origin} failed: {error}"),
        }
    };

    // This has no effect if the rank has left before.
    shared.apply((rank, number), Addressed::to_all(Event::Lost { how }));
}

/// Describes why a connection is rejected, and what the hub answers.
struct Rejection {
    reason: String,
    /// The rank that has connected, if it has proved that it belongs to the job.
    rank: Option<Rank>,
    /// The last bytes that the hub sends on the connection, if any.
    answer: Vec<u8>,
}

impl From<String> for Rejection {
    fn from(reason: String) -> Self {
        Self { reason, rank: None, answer: Vec::new() }
    }
}

/// Performs the hub's side of the handshake, and returns the rank that has joined and its process.
fn handshake(
    shared: &Arc<Shared>,
    connection: &Stream,
    (origin, number): (SocketAddr, u64),
    exhausted: Option<&SystemError>,
) -> Result<(Rank, Option<ProcessId>), Rejection> {
    // Other connections wait meanwhile if the hub is exhausted.
    let timeout = exhausted.map_or(HANDSHAKE_TIMEOUT, |_| REJECT_TIMEOUT);
    let failed = |error| io_rejection(error, timeout);

    let stream: &TcpStream = connection;
    stream.set_nodelay(true).map_err(failed)?;
    (&mut &*stream).write_all(&preamble()).map_err(failed)?;

    let mut reader = DeadlineReader { stream, deadline: Deadline::after(timeout) };
    read_preamble(&mut reader).map_err(|error| no_rank(error, shared.ranks, timeout))?;

    let nonce = random_bytes().map_err(|error| error.to_string())?;
    (&mut &*stream).write_all(encode_frame(&nonce).bytes()).map_err(failed)?;

    let request: Sealed = match read_frame(&mut reader, HANDSHAKE_BYTES_MAX) {
        Ok(Some(request)) => request,
        Ok(None) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
        Err(FrameError::Io(error)) => return Err(failed(error)),
        Err(error) => return Err(error.to_string().into()),
    };

    let secret = shared.secret.as_ref();
    let seal =
        |reply: &HelloReply| Sealed::new(secret, Side::Hub, &[&nonce, &request.message.0], reply);

    let hello: Hello = request.open(secret, Side::Rank, &[&nonce]).map_err(|error| {
        let reason = unproven_text(error).to_owned();
        let answer = encode_frame(&seal(&HelloReply::Refused(Refusal::Unproven))).bytes().to_vec();
        Rejection { reason, rank: None, answer }
    })?;

    let rank = Rank(hello.rank);
    let refused = |error: &SystemError| {
        let reason = error.to_string();
        let runs_hub = shared.run_by().map(|rank| rank.0);
        let refusal = Refusal::Exhausted { how: reason.clone(), runs_hub };
        let answer = encode_frame(&seal(&HelloReply::Refused(refusal))).bytes().to_vec();
        Rejection { reason, rank: Some(rank), answer }
    };

    // Only now, because a connection that has not proved that it belongs to the job must not end
    // the start.
    if let Some(error) = exhausted {
        shared.fail(error);
        return Err(refused(error));
    }

    // `DeadlineReader` has limited each read. The thread waits for ever for the rank's requests.
    stream.set_read_timeout(None).map_err(failed)?;
    keep_alive(stream, origin.ip());

    let outbox = Outbox::open(connection).map_err(|error| {
        shared.fail(&error);
        refused(&error)
    })?;

    let process = hello.process.clone();
    match shared.admit(hello, (origin, number), outbox, seal) {
        Ok(rank) => Ok((rank, process)),
        // `admit` has sent its refusal itself, so the rejection has no answer.
        Err(refusal) => Err(Rejection { rank: Some(rank), ..Rejection::from(refusal.to_string()) }),
    }
}

/// Converts an I/O error of the handshake, which had to end within `timeout`, into a rejection of
/// the connection.
fn io_rejection(error: io::Error, timeout: Duration) -> Rejection {
    let reason = if is_timeout(&error) {
        format!("it did not join within {}", Seconds(timeout))
    } else if has_closed(&error) {
        "it closed before it joined".to_owned()
    } else {
        error.to_string()
    };

    Rejection::from(reason)
}

/// Converts an error in reading the preamble into a rejection of the connection.
fn no_rank(error: PreambleError, ranks: usize, timeout: Duration) -> Rejection {
    match error {
        PreambleError::Io(error) => io_rejection(error, timeout),
        PreambleError::Foreign(_) => {
            let reason = "it sent bytes of another protocol".to_owned();
            Rejection { reason, rank: None, answer: foreign_text(ranks) }
        }
        // The rank knows the hub's version from the preamble and reports it better.
        PreambleError::Version(version) => {
            format!("it uses version {version} of the protocol, expected {VERSION}").into()
        }
    }
}

fn unproven_text(error: OpenError) -> &'static str {
    match error {
        OpenError::NoProof => "it has no secret, but the hub has one",
        OpenError::NoSecret => "it has a secret, but the hub has none",
        OpenError::WrongProof => "it has another secret than the hub",
        OpenError::Malformed => "it sent a message that is no hello",
    }
}

/// Returns the text that the hub sends to a program that speaks another protocol.
///
/// The user of the program may see it.
fn foreign_text(ranks: usize) -> Vec<u8> {
    format!(
        "\nThis is the hub of a Peerlane group of {ranks} ranks, protocol version {VERSION}. It \
         received bytes of another protocol.\n"
    )
    .into_bytes()
}

/// Sends the last answer to a rejected connection, and discards for a moment what arrives.
///
/// A close with unread bytes would discard the answer.
fn reject(mut stream: &TcpStream, text: &[u8]) {
    let sent = stream.write_all(text).and_then(|()| stream.shutdown(Shutdown::Write));
    if sent.is_ok() {
        let reader = DeadlineReader { stream, deadline: Deadline::after(REJECT_TIMEOUT) };
        let _ = io::copy(&mut reader.take(REJECT_BYTES), &mut io::sink());
    }
}
