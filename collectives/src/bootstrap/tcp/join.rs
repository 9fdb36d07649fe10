//! The way of a rank to its hub: find it, be patient until it listens, and be taken.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::super::message::Seconds;
use super::connection::{Bounded, is_timeout};
use super::frame::{self, FrameError};
use super::handshake::{
    Answer, HANDSHAKE_BYTES_MAX, Hello, PreambleError, Refusal, VERSION, preamble, read_preamble,
};
use crate::error::Error;

/// The pause before the second attempt to connect; it doubles from attempt to attempt.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Why one attempt came to nothing.
enum Attempt {
    /// The hub may come, or come back.
    Again(String),
    /// It never will.
    Final(Error),
}

/// Connects to the hub at `address` until `deadline`, and says hello.
pub(super) fn join(address: &str, hello: &Hello, deadline: Deadline) -> Result<TcpStream, Error> {
    let mut pause = PAUSE_MIN;
    loop {
        let reason = match attempt(address, hello, deadline) {
            Ok(stream) => return Ok(stream),
            Err(Attempt::Final(error)) => return Err(error),
            Err(Attempt::Again(reason)) => reason,
        };
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Err(not_reached(address, hello, deadline, &reason));
        }
        thread::sleep(pause.min(remaining));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn attempt(address: &str, hello: &Hello, deadline: Deadline) -> Result<TcpStream, Attempt> {
    let again = |error: io::Error| Attempt::Again(error.to_string());
    let stream = connect(&resolve(address, deadline)?, deadline).map_err(again)?;
    stream.set_nodelay(true).map_err(again)?;
    let mut words = preamble().to_vec();
    words.extend_from_slice(&frame::encode(hello));
    (&mut &stream).write_all(&words).map_err(again)?;
    let mut bounded = Bounded { stream: &stream, deadline };
    read_preamble(&mut bounded).map_err(|error| no_hub(address, error))?;
    match frame::read(&mut bounded, HANDSHAKE_BYTES_MAX) {
        Ok(Some(Answer::Welcome)) => {}
        Ok(Some(Answer::Refused(Refusal::Closing)) | None) => {
            return Err(Attempt::Again("the hub closed the connection".into()));
        }
        Ok(Some(Answer::Refused(refusal))) => return Err(refused(address, &refusal)),
        Err(FrameError::Io(error)) if is_timeout(&error) => {
            return Err(Attempt::Again(SILENT.into()));
        }
        Err(error) => return Err(Attempt::Again(error.to_string())),
    }
    stream.set_read_timeout(None).map_err(again)?;
    Ok(stream)
}

const SILENT: &str = "it took the connection and said nothing, as something other than a hub may";

/// Names take as long as the system's resolver likes, so another thread asks it.
fn resolve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, Attempt> {
    if let Ok(literal) = address.parse() {
        return Ok(vec![literal]);
    }
    let (answer, answered) = channel();
    let name = address.to_owned();
    let resolver = thread::Builder::new().name("peerlane-resolve".into()).spawn(move || {
        let _ = answer.send(name.to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    });
    resolver.map_err(|error| Attempt::Again(format!("no thread to resolve the name: {error}")))?;
    match answered.recv_timeout(deadline.remaining()) {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(Attempt::Again(error.to_string())),
        Err(_) => Err(Attempt::Again("the name was not resolved in time".into())),
    }
}

fn connect(addresses: &[SocketAddr], deadline: Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        // A connect timeout of zero is an error of its own.
        let timeout = deadline.remaining().max(Duration::from_millis(1));
        match TcpStream::connect_timeout(address, timeout) {
            // TCP can connect a port of this host that nobody listens at to itself.
            Ok(stream) if stream.local_addr()? == *address => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn no_hub(address: &str, error: PreambleError) -> Attempt {
    let text = match error {
        PreambleError::Io(error) if is_timeout(&error) => return Attempt::Again(SILENT.into()),
        PreambleError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Attempt::Again("it took the connection and closed it".into());
        }
        PreambleError::Io(error) => return Attempt::Again(error.to_string()),
        PreambleError::Foreign(bytes) => format!(
            "what listens at {address} is no Peerlane hub; it began with \"{}\". Set PEERLANE_PORT, \
             or MASTER_PORT, to another port, the same for every rank",
            bytes.escape_ascii()
        ),
        PreambleError::Version(version) => format!(
            "the hub at {address} speaks version {version} of the protocol, this rank version \
             {VERSION}: every rank must run the same version of Peerlane"
        ),
    };
    Attempt::Final(Error::new(ErrorKind::Mismatch, text))
}

fn refused(address: &str, refusal: &Refusal) -> Attempt {
    let kind = match refusal {
        Refusal::Over { .. } => ErrorKind::Aborted,
        _ => ErrorKind::Mismatch,
    };
    let error =
        Error::new(kind, format!("the hub at {address} does not take this rank: {refusal}"));
    Attempt::Final(match refusal {
        Refusal::Taken { rank, .. } => error.with_peer(Rank(*rank)),
        _ => error,
    })
}

fn not_reached(address: &str, hello: &Hello, deadline: Deadline, reason: &str) -> Error {
    let text = format!(
        "rank {} did not reach the hub at {address} within {}: {reason}. Check that rank 0 runs, \
         that MASTER_ADDR and MASTER_PORT name its host and a free port, and that no firewall is \
         between",
        hello.rank,
        Seconds(deadline.timeout())
    );
    Error::new(ErrorKind::Timeout, text).with_peer(Rank(0))
}
