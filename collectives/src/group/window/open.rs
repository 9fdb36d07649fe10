//! Opens a window by exchanging the remote keys of its memory and importing the memory of every peer.

use std::sync::Arc;

use peerlane_hal::{Deadline, DynRegion, ErrorKind, Rank};

use super::Inner;
use crate::element::DType;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::blob;
use crate::group::agreement::{Offer, agree};
use crate::group::side::{Keys, Side};
use crate::run::buffers::BufferId;
use crate::topology::Topology;

const WINDOW: BufferId = BufferId::OUTPUT;

type Sides<'g> = Vec<Side<'g>>;

/// An error in `bytes` on one rank is an error on all ranks.
pub(in crate::group) fn open(
    group: &mut Group,
    dtype: DType,
    given: Option<DynRegion>,
    bytes: Result<u64, Error>,
) -> Result<Inner, Error> {
    group.shared.check()?;
    group.windows += 1;
    let (number, me, topology) = (group.windows, group.rank(), group.topology.clone());
    let name = format!("window {number}");
    let deadline = Deadline::after(group.timeout());
    let (shared, users) = (Arc::clone(&group.shared), Arc::clone(&group.users));

    let drafted = bytes.and_then(|bytes| {
        let sides = sides(group, given, bytes)?;
        Ok((offer(dtype, &sides, bytes)?, (sides, bytes)))
    });
    let (offer, mut draft) = match drafted {
        Ok((offer, draft)) => (Ok(offer), Ok(draft)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let offers = agree(&shared, &name, offer, deadline)?;
    let imported = match &mut draft {
        Ok((sides, bytes)) => import(sides, me, &topology, &offers, *bytes, deadline),
        Err(error) => Err(error.clone()),
    };
    let vote = imported.as_ref().map(|()| Offer::default()).map_err(Error::clone);
    // After an error the draft lives until all ranks know of it: they may be importing from here.
    agree(&shared, &format!("{name}, import"), vote, deadline)?;
    imported?;
    let mut lent = draft?.0.into_iter().map(|side| side.share(WINDOW));
    let local = lent.next().expect("there is a local fabric");
    Ok(Inner { number, local, network: lent.next(), users, shared })
}

fn sides(group: &mut Group, given: Option<DynRegion>, bytes: u64) -> Result<Sides<'_>, Error> {
    let mut local = Side::new(&mut group.fabric);
    match given {
        Some(buffer) => local.insert(WINDOW, buffer),
        None => local.allocate(WINDOW, bytes)?,
    }
    let mut sides = vec![local];
    if let Some(network) = &mut group.network {
        let mut network = Side::new(network);
        network.register(WINDOW, &sides[0])?;
        sides.push(network);
    }
    Ok(sides)
}

fn offer(dtype: DType, sides: &Sides<'_>, bytes: u64) -> Result<Offer, Error> {
    let mut offer = Offer::default()
        .field("operation", "window")
        .field("dtype", dtype)
        .field("window_bytes", bytes);
    for side in sides {
        let keys = side.keys(&[WINDOW])?;
        offer = offer.blob(postcard::to_stdvec(&keys).expect("plain data always encodes"));
    }
    Ok(offer)
}

fn import(
    sides: &mut Sides<'_>,
    me: Rank,
    topology: &Topology,
    offers: &[Offer],
    bytes: u64,
    deadline: Deadline,
) -> Result<(), Error> {
    let alone = sides.len() == 1;
    for (index, side) in sides.iter_mut().enumerate() {
        for (peer, offer) in Rank::all(offers.len()).zip(offers) {
            let near = topology.node(peer) == topology.node(me);
            if !alone && peer != me && near != (index == 0) {
                continue;
            }
            let keys: Keys = postcard::from_bytes(blob(offer, peer, index)?).map_err(|error| {
                let text = format!(
                    "cannot decode the remote keys of rank {peer}: {error}; run the same Peerlane \
                     on all ranks"
                );
                Error::new(ErrorKind::InvalidKey, text).with_peer(peer)
            })?;
            side.import(peer, WINDOW, &keys, bytes, deadline)?;
        }
    }
    Ok(())
}
