//! The hub's side of one connection, from the first byte to the last.
//!
//! Whatever is no rank of this group gets a text and is shown out; the group does not notice.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};

use super::super::message::Request;
use super::super::point::Event;
use super::connection::{Bounded, Outbox};
use super::frame::{self, FRAME_BYTES_MAX};
use super::handshake::{
    HANDSHAKE_BYTES_MAX, Hello, PreambleError, VERSION, preamble, read_preamble,
};
use super::hub::Shared;

/// How long somebody who has connected may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// How much of a stranger's words is read, and how long, so that it can read the answer.
const FAREWELL_BYTES: u64 = 64 << 10;
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves a connection until it ends.
pub(super) fn serve(shared: &Arc<Shared>, stream: TcpStream) {
    let Some((rank, origin)) = admit(shared, &stream) else { return };
    let mut reader = BufReader::new(stream);
    let how = loop {
        match frame::read::<Request>(&mut reader, FRAME_BYTES_MAX) {
            Ok(Some(request)) => shared.take(rank, Event::Said(request)),
            Ok(None) => break format!("its connection from {origin} closed without a goodbye"),
            Err(error) => break format!("on its connection from {origin}, {error}"),
        }
    };
    shared.take(rank, Event::Lost { how });
}

fn admit(shared: &Arc<Shared>, stream: &TcpStream) -> Option<(Rank, SocketAddr)> {
    let origin = origin(stream).ok()?;
    stream.set_nodelay(true).ok()?;
    (&mut &*stream).write_all(&preamble()).ok()?;
    let mut bounded = Bounded { stream, deadline: Deadline::after(HELLO_TIMEOUT) };
    match read_preamble(&mut bounded) {
        Ok(()) => {}
        Err(PreambleError::Io(_)) => return None,
        Err(PreambleError::Foreign(_)) => {
            show_out(stream, &stranger(shared.ranks()));
            return None;
        }
        Err(PreambleError::Version(_)) => {
            // The rank has the hub's version from the preamble and says it better.
            show_out(stream, &[]);
            return None;
        }
    }
    let hello: Hello = frame::read(&mut bounded, HANDSHAKE_BYTES_MAX).ok()??;
    stream.set_read_timeout(None).ok()?;
    let outbox = Outbox::open(stream).ok()?;
    let rank = Rank(hello.rank);
    shared.seat(hello, origin, outbox).then_some((rank, origin))
}

fn origin(stream: &TcpStream) -> io::Result<SocketAddr> {
    let address = stream.peer_addr()?;
    Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn stranger(ranks: usize) -> Vec<u8> {
    format!(
        "\nThis is the hub of a Peerlane group of {ranks} ranks, protocol version {VERSION}. What \
         came is not that protocol.\n"
    )
    .into_bytes()
}

/// Says `last`, and reads on for a moment: closing with words unread would take the answer back.
fn show_out(mut stream: &TcpStream, last: &[u8]) {
    let said = stream.write_all(last).and_then(|()| stream.shutdown(Shutdown::Write));
    let bounded = Bounded { stream, deadline: Deadline::after(FAREWELL_TIMEOUT) };
    if said.is_ok() {
        let _ = io::copy(&mut bounded.take(FAREWELL_BYTES), &mut io::sink());
    }
}
