//! Opens windows: each rank registers its region on every fabric, and imports the regions of the ranks that the fabric
//! reaches.

use std::sync::Arc;

use peerlane_hal::{Deadline, DynRegion, Fabric as _, PeerMemory, Role};

use super::Inner;
use crate::element::DType;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::Offer;
use crate::group::segment::{Fabrics, Segment, exchange};
use crate::plan::Tier;

pub(in crate::group) fn open(
    group: &mut Group,
    dtype: DType,
    given: Option<DynRegion>,
    bytes: Result<u64, Error>,
) -> Result<Inner, Error> {
    group.shared.check()?;
    group.windows += 1;
    let (number, fabrics, shared) = (group.windows, group.fabrics(), Arc::clone(&group.shared));
    let name = format!("window {number}");
    let own = bytes.and_then(|bytes| {
        let offer = Offer::default()
            .field("operation", "window")
            .field("dtype", dtype)
            .field("window_bytes", bytes);
        Ok((offer, vec![segment(fabrics, given, bytes)?]))
    });
    let deadline = Deadline::after(group.timeout());
    let segments = exchange(&shared, fabrics, &name, own, deadline)?;
    let segment = segments.into_iter().next().expect("one segment was exchanged");
    Ok(Inner { number, segment, users: Arc::clone(&group.users), shared })
}

fn segment(fabrics: Fabrics<'_>, given: Option<DynRegion>, bytes: u64) -> Result<Segment, Error> {
    let region = match given {
        Some(region) => region,
        None => {
            let region = fabrics.local.memory().allocate(bytes, Role::Data);
            region.map_err(|error| Error::of_fabric("allocate the window", error))?
        }
    };
    let mut segment = Segment::new(Tier::Local, region);
    if fabrics.network.is_some() {
        segment.register(Tier::Network, fabrics, Role::Data, "the window")?;
    }
    Ok(segment)
}
