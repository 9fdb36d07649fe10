//! Opening a group.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Fabric, Rank};

use crate::bootstrap::Bootstrap;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};
use crate::group::shared::Shared;
use crate::topology::Topology;

/// How a group behaves.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    timeout: Duration,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30) }
    }
}

impl GroupOptions {
    /// How long a call waits for other ranks unless it says otherwise; 30 s at first.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Opens the group: ranks exchange addresses and connect. Collective.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a zero timeout;
    /// [`Mismatch`](ErrorKind::Mismatch) if ranks differ in backend, version or timeout;
    /// [`PeerLost`](ErrorKind::PeerLost) and [`Timeout`](ErrorKind::Timeout), naming the rank.
    pub fn open<F: Fabric>(
        self,
        bootstrap: impl Bootstrap + 'static,
        mut fabric: F,
    ) -> Result<Group<F>, Error> {
        check_timeout(self.timeout)?;
        let shared = Shared::new(Box::new(bootstrap), self.timeout);
        let deadline = Deadline::after(self.timeout);
        let offers = agree(&shared, "open", offer(&shared, &fabric), deadline)?;
        let connected = connect(&mut fabric, &offers, deadline);
        let topology = connected.and_then(|()| topology(&offers));
        let vote = topology.as_ref().map(|_| Offer::default()).map_err(Error::clone);
        agree(&shared, "connect", vote, deadline)?;

        let guarded = Arc::clone(&shared);
        let watchdog = std::thread::Builder::new()
            .name("peerlane-watchdog".to_owned())
            .spawn(move || guarded.guard())
            .map_err(|error| {
                Error::new(ErrorKind::Other, format!("start the watchdog: {error}"))
                    .with_source(error)
            })?;
        let topology = topology?;
        Ok(Group { fabric, topology, shared, watchdog: Some(watchdog), prepared: 0, barrier: None })
    }
}

fn offer<F: Fabric>(shared: &Shared, fabric: &F) -> Result<Offer, Error> {
    let bootstrap = &shared.bootstrap;
    if fabric.rank() != bootstrap.rank() {
        let text = format!(
            "the fabric was opened as rank {}, the bootstrap as rank {}",
            fabric.rank(),
            bootstrap.rank()
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(Offer::default()
        .field("version", env!("CARGO_PKG_VERSION"))
        .field("backend", fabric.backend())
        .field("timeout", format_args!("{:?}", shared.timeout))
        .blob(bootstrap.host().as_bytes().to_vec())
        .blob(fabric.address()))
}

fn connect<F: Fabric>(fabric: &mut F, offers: &[Offer], deadline: Deadline) -> Result<(), Error> {
    for (index, offer) in offers.iter().enumerate() {
        let peer = Rank::at(index);
        fabric.connect(peer, blob(offer, peer, 1)?, deadline).map_err(|error| {
            Error::of_backend(format!("connect to rank {peer}"), error).with_peer(peer)
        })?;
    }
    Ok(())
}

/// Ranks that name the same host share a node; nodes are numbered as they appear.
fn topology(offers: &[Offer]) -> Result<Topology, Error> {
    let mut hosts: Vec<&[u8]> = Vec::new();
    let mut nodes = Vec::with_capacity(offers.len());
    for (index, offer) in offers.iter().enumerate() {
        let host = blob(offer, Rank::at(index), 0)?;
        let known = hosts.iter().position(|known| *known == host);
        let node = known.unwrap_or_else(|| {
            hosts.push(host);
            hosts.len() - 1
        });
        nodes.push(Rank::at(node).0);
    }
    Topology::of_nodes(&nodes)
}

/// What `peer` brought along at `index`.
pub(super) fn blob(offer: &Offer, peer: Rank, index: usize) -> Result<&[u8], Error> {
    offer.blobs.get(index).map(Vec::as_slice).ok_or_else(|| {
        let text =
            format!("rank {peer} sent {} items, wanted more than {index}", offer.blobs.len());
        Error::new(ErrorKind::Mismatch, text).with_peer(peer)
    })
}

/// # Errors
/// If it is zero.
pub(super) fn check_timeout(timeout: Duration) -> Result<(), Error> {
    if timeout.is_zero() {
        let text = "timeout is 0 s, wanted more; nothing can finish in no time";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
