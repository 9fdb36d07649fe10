//! The UCX backend of Peerlane moves bytes between hosts over the networks that UCX drives, such as
//! Ethernet. Ranks are processes, or threads of one.
//!
//! It loads `libucp.so.0`, a part of UCX 1.13 or newer, at run time and does not need it to build.
//! If the library is missing or too old, every call returns an error that names what to install.
//! All hosts need the same major and minor version.
//!
//! # How the contract maps to UCX
//!
//! Everything is an active message. With UCX 1.13 over TCP, a put of 1 MiB takes four times as long
//! as a message of 1 MiB, and one of 8 bytes three times. A message is also safer for ranks that
//! follow the contract: its receiver finds the region by a number that cannot be guessed, and drops
//! what does not fit, where a put of UCX writes to an address that may have been freed.
//!
//! | the contract | UCX |
//! | --- | --- |
//! | `Fabric::open` | a context and a worker, which all engines of the rank share, and a thread that drives it while nobody polls |
//! | `Fabric::connect` | a question to the peer whether it is the rank of this address |
//! | `Fabric::engine` | nothing of UCX; the first message to a peer creates an endpoint |
//! | `PeerMemory::allocate` | a memfd |
//! | `PeerMemory::register`, `adopt` | any host memory |
//! | `PeerMemory::export`, `import` | the number of the region; `import` asks the owner whether it still exists |
//! | `Op::Put` | messages of up to [`Options::message_bytes_max`]; UCX copies small ones, and fetches large ones when the receiver has found their place |
//! | `Op::Get` | a message that asks for the bytes, which are the reply |
//! | `Op::Signal` | part of the last message of the put before it or of the first one of the put behind it, otherwise a message without bytes; the receiver stores the flag when all bytes before it are in place |
//! | an op on memory of this rank | a copy by the processor; a flag is stored after all earlier completions |
//! | `Op::Wait` | not queued: the executor polls the flag |
//! | a complete ticket | UCX has taken all bytes; a flush would cost a round trip over TCP |
//! | `completed` | `ucp_worker_progress`, and the next messages |
//! | `park` | sleeps on the descriptor of the worker; the waker, and a flag stored by another thread of the rank, write to an event descriptor |
//! | `release` | drops what was not sent, waits for the rest, and closes the endpoint of a peer that takes none of it for two seconds; for a peer of the same host, everything |
//! | `fork`, `join` | unreachable: no stream runs on a network |
//!
//! UCX does not promise the order of messages, so each has a number, and the receiver takes them in
//! their order.
//!
//! # Progress
//!
//! UCX moves bytes only within calls. The caller drives it by `completed` of any engine. When
//! nobody has done so for two milliseconds, a thread takes over, so that peers do not wait for a
//! rank that computes. It sleeps until something arrives.
//!
//! # Losses
//!
//! A peer on another host that is gone, or whose connection breaks, fails the ops with it:
//! `PeerLost` with rank, host and addresses. Shared memory between processes of one host does not
//! notice it; there the bootstrap does, as for other backends. A link that is down is no error by
//! itself: TCP repeats what was lost, and the deadline of the group ends the wait.
//!
//! # What is left out
//!
//! - Device memory: [`adopt`](peerlane_hal::PeerMemory::adopt) refuses it, and groups stage it
//!   through host memory.
//! - Authentication and encryption, which UCX does not have. Whoever can connect to the ports of
//!   UCX can write to any memory of the process, because UCX carries out puts of its own protocol.
//!   So the network between the hosts must be one that only they use, and their users must trust
//!   each other.
//!
//! UCX prints warnings and errors of its own; `UCX_LOG_LEVEL=fatal` hides them. At load it installs
//! handlers that print a backtrace when the process crashes; `UCX_HANDLE_ERRORS=none` prevents
//! that.

// Imports go one way: fabric, engine, memory, network, registration, key, device, sys, options,
// error.
mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod network;
mod options;
mod registration;
mod sys;

pub use device::{Device, discover, version};
pub use engine::Engine;
pub use error::{Error, Status};
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};
pub use options::Options;
