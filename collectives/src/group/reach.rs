//! A fabric without its types, for opening a group.
//!
//! A group has a type parameter for its local fabric only, whose memory the caller owns. The fabric between nodes, and
//! everything that needs no type of the local one, uses this trait.

use peerlane_hal::{BackendId, Deadline, Fabric, Link, Rank};

use crate::error::Error;
use crate::group::side::{FabricSide, Side};

/// A fabric without its types.
pub(crate) trait Reach: Send {
    fn backend(&self) -> BackendId;
    fn rank(&self) -> Rank;
    fn address(&self) -> Vec<u8>;
    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error>;
    /// Returns the link to a connected peer.
    fn link(&self, peer: Rank) -> Option<Link>;
    /// Begins an operation on this fabric.
    fn side(&mut self) -> Box<dyn Side + '_>;
}

impl<F: Fabric> Reach for F {
    fn backend(&self) -> BackendId {
        Fabric::backend(self)
    }

    fn rank(&self) -> Rank {
        Fabric::rank(self)
    }

    fn address(&self) -> Vec<u8> {
        Fabric::address(self)
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        Fabric::connect(self, peer, address, deadline).map_err(|error| {
            Error::of_backend(format!("connect to rank {peer}"), error).with_peer(peer)
        })
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        Fabric::link(self, peer)
    }

    fn side(&mut self) -> Box<dyn Side + '_> {
        Box::new(FabricSide::new(self))
    }
}
