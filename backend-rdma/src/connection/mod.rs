//! Connects ranks through a TCP service, over which they open RDMA queue pairs, and receives the signals of
//! peers.
//!
//! An address names a small TCP service of the rank. To connect, a peer opens a connection to the service
//! and sends a token of the address; the service answers with another token of it. The peer uses the connection to ask whether a region still exists when it
//! imports a key, and to open the other end of an engine's queue pairs, one per peer, when an op first
//! names that peer. So engines can be created at any time and in any order, only ranks that communicate are
//! connected, and a rank that ends takes the other ends of its queue pairs with it.
//!
//! | file | holds |
//! | --- | --- |
//! | `address.rs` | the address that a rank publishes |
//! | `client.rs` | serving one client of the service |
//! | `control.rs` | requests to a peer's service over TCP |
//! | `receiver.rs` | receiving signals of peers, and waking threads that sleep |
//! | `service.rs` | the thread that answers peers and handles events of the NICs |
//! | `signals.rs` | the wire format of signals, and their order |

mod address;
#[cfg(test)]
mod attacks;
mod client;
mod control;
mod receiver;
mod service;
mod signals;

use std::sync::{Arc, Mutex, PoisonError};

use peerlane_hal::Rank;
use peerlane_toolkit::Fault;

use crate::error::Error;
use crate::nic::Nic;

pub(crate) use address::Address;
pub(crate) use control::{Control, OpenRequest};
pub(crate) use receiver::SignalReceiver;
pub(crate) use service::{Resources, Service};
pub(crate) use signals::{FlagIds, FlagWord, INCREMENT_MAX, Immediate, QpRole, RAILS_MAX};

#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) service: Service,
    pub(crate) resources: Arc<Resources>,
    peers: Mutex<Vec<Option<Peer>>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Peer {
    Own,
    Other(Arc<Control>),
}

impl Connections {
    pub(crate) fn new(service: Service, resources: Arc<Resources>) -> Self {
        let peers = Mutex::new(vec![None; resources.ranks]);
        Self { service, resources, peers }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.resources.rank
    }

    pub(crate) fn nics(&self) -> &[Nic] {
        &self.resources.nics
    }

    pub(crate) fn receiver(&self) -> &SignalReceiver {
        &self.resources.receiver
    }

    pub(crate) fn add(&self, rank: Rank, peer: Peer) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers[rank.index()] = Some(peer);
    }

    pub(crate) fn peer(&self, peer: Rank) -> Result<Peer, Error> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = peers.get(peer.index()).cloned().flatten();
        Ok(found.ok_or(Fault::NotConnected { peer })?)
    }

    pub(crate) fn queue_pairs_per_nic(&self) -> u32 {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let nics = self.resources.nics.len();
        let queue_pairs = peers.iter().flatten().map(|peer| match peer {
            Peer::Own => 0,
            Peer::Other(control) => self.resources.rails(control.nics).div_ceil(nics),
        });
        u32::try_from(queue_pairs.sum::<usize>().max(1)).unwrap_or(u32::MAX)
    }
}
