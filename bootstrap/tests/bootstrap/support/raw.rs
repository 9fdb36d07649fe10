//! Connections to a hub that send raw bytes, as a rank or as a process that is none.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use hmac_sha256::HMAC;
use peerlane_bootstrap::tcp::Hub;
use peerlane_hal::Rank;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketType, connect, socket};

pub(crate) const PREAMBLE: &[u8; 12] = b"PEERLANE\x08\0\0\0";

/// The start of a message of the first group.
pub(crate) const NO_SUBGROUP: Option<(u32, u32)> = None;

/// Far below a patient deadline; a test fails if something takes longer.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(15);

/// How long anything may take that does not wait for a deadline.
pub(crate) const PROMPT: Duration = Duration::from_secs(1);

/// What the proof of a rank says about its side.
pub(crate) const RANK: &str = "peerlane: rank to hub";

/// The nonce of every rank with raw bytes.
pub(crate) const NONCE: [u8; 32] = [7; 32];

/// Connects and sends these bytes.
pub(crate) fn stranger(hub: &Hub, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(hub.address()).unwrap();
    stream.set_read_timeout(Some(AT_ONCE)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// Returns a frame with this content.
pub(crate) fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// Reads the content of the next frame.
pub(crate) fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).unwrap();
    body
}

/// Sends the preamble, and returns the nonce of the hub.
pub(crate) fn challenge(hub: &Hub) -> (TcpStream, Vec<u8>) {
    challenge_at(hub.address())
}

fn challenge_at(hub: SocketAddr) -> (TcpStream, Vec<u8>) {
    challenge_on(TcpStream::connect(hub).unwrap())
}

fn challenge_on(mut stream: TcpStream) -> (TcpStream, Vec<u8>) {
    stream.set_read_timeout(Some(AT_ONCE)).unwrap();
    stream.write_all(PREAMBLE).unwrap();
    let mut preamble = [0; PREAMBLE.len()];
    stream.read_exact(&mut preamble).unwrap();
    assert_eq!(&preamble, PREAMBLE);
    let nonce = read_frame(&mut stream);
    assert_eq!(nonce.len(), 32);
    (stream, nonce)
}

/// Returns the hello of a rank.
pub(crate) fn hello(rank: u32, ranks: u32) -> Vec<u8> {
    let (address, process, shrinks) = (None::<SocketAddr>, None::<()>, None::<[u8; 32]>);
    let hello = (NONCE, rank, ranks, "a host", None::<&str>, false, address, process, shrinks);
    postcard::to_stdvec(&hello).unwrap()
}

/// Returns the proof of one side for a message, after the messages of the handshake before it.
pub(crate) fn proof(secret: &str, side: &str, messages: &[&[u8]]) -> [u8; 32] {
    let mut mac = HMAC::new(secret.as_bytes());
    for part in [side.as_bytes()].iter().chain(messages) {
        mac.update((part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize()
}

/// Returns the frame of a message with its proof, if there is one.
pub(crate) fn sealed(proof: Option<[u8; 32]>, message: &[u8]) -> Vec<u8> {
    let proof = proof.map_or_else(|| vec![0], |proof| [&[1][..], &proof].concat());
    let message = postcard::to_stdvec(message).unwrap();
    frame(&[proof, message].concat())
}

/// A rank that has joined, and does nothing by itself.
pub(crate) struct Silent(pub(crate) TcpStream);

impl Silent {
    pub(crate) fn join(hub: &Hub, rank: u32, ranks: u32) -> Self {
        Self::join_at(hub.address(), rank, ranks)
    }

    pub(crate) fn join_at(hub: SocketAddr, rank: u32, ranks: u32) -> Self {
        let (mut stream, _) = challenge_at(hub);
        stream.write_all(&sealed(None, &hello(rank, ranks))).unwrap();
        // No proof, and a message of kind 0: welcome.
        let reply = read_frame(&mut stream);
        assert_eq!((reply[0], reply[2]), (0, 0), "not welcome");
        Self(stream)
    }

    /// Joins a group whose ranks know a secret. The kernel keeps little of what the rank does not read.
    pub(crate) fn join_with(hub: SocketAddr, rank: u32, ranks: u32, secret: &str) -> Self {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        set_socket_recv_buffer_size(&socket, 16 << 10).unwrap();
        connect(&socket, &hub).unwrap();
        let (mut stream, nonce) = challenge_on(TcpStream::from(socket));
        let hello = hello(rank, ranks);
        let proof = proof(secret, RANK, &[&nonce, &hello]);
        stream.write_all(&sealed(Some(proof), &hello)).unwrap();
        // The proof of the hub, and a message of kind 0: welcome.
        let reply = read_frame(&mut stream);
        assert_eq!((reply[0], reply[34]), (1, 0), "not welcome");
        Self(stream)
    }

    pub(crate) fn origin(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Reads a message of the first group.
    pub(crate) fn frame(&mut self) -> Vec<u8> {
        let mut frame = read_frame(&mut self.0);
        assert_eq!(frame.remove(0), 0, "a message of a subgroup");
        frame
    }

    /// Waits until the group is over, which is message number 2.
    pub(crate) fn wait_over(&mut self) {
        while self.frame()[0] != 2 {}
    }

    /// Ends as its process would, and returns once the hub has noted it, which closes the connection from its side.
    pub(crate) fn end(mut self) {
        self.0.shutdown(Shutdown::Write).unwrap();
        self.0.read_to_end(&mut Vec::new()).unwrap();
    }

    /// Contributes to an exchange.
    pub(crate) fn contribute(&mut self, label: &str, bytes: &[u8]) {
        let request = postcard::to_stdvec(&(NO_SUBGROUP, 0_u8, label, bytes)).unwrap();
        self.0.write_all(&frame(&request)).unwrap();
    }
}

/// Waits until all but these ranks have joined.
pub(crate) fn wait_missing(hub: &Hub, ranks: &[u32]) {
    let ranks: Vec<_> = ranks.iter().copied().map(Rank).collect();
    while hub.missing() != ranks {
        thread::sleep(Duration::from_millis(1));
    }
}
