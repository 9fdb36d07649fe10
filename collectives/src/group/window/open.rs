//! Opens and releases windows: each rank registers its region on every fabric, and imports the regions of the ranks that the fabric
//! reaches.

use std::sync::Arc;

use peerlane_hal::{Deadline, DynRegion, ErrorKind};

use super::Inner;
use crate::element::DType;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};
use crate::group::segment::{Segment, exchange};

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
        let segment = match given {
            Some(region) => Segment::of_data(fabrics, region, "the window"),
            None => Segment::allocate(fabrics, bytes, "the window"),
        };
        Ok((offer, vec![segment?]))
    });
    let deadline = Deadline::after(group.timeout());
    let segments = exchange(&shared, fabrics, &name, own, deadline)?;
    let segment = segments.into_iter().next().expect("one segment was exchanged");
    Ok(Inner { number, segment, users: Arc::clone(&group.users), shared })
}

/// Gives the memory of a window back on every rank. If a rank still uses the window, all keep it.
///
/// After the first agreement no rank uses the window any more, so each ends its imports. After the second one all have.
pub(in crate::group) fn release(group: &mut Group, inner: Arc<Inner>) -> Result<(), Error> {
    group.shared.check()?;
    let (shared, deadline) = (Arc::clone(&group.shared), Deadline::after(group.timeout()));
    let label = format!("release window {}", inner.number);
    let offer = match Arc::strong_count(&inner) {
        _ if !Arc::ptr_eq(&inner.shared, &shared) => Err(Error::new(
            ErrorKind::InvalidArgument,
            "the window belongs to another group; release it with that group",
        )),
        1 => Ok(Offer::default()),
        _ => {
            let text = format!(
                "window {} is still used by an operation or a channel; drop these before the window is released",
                inner.number
            );
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    };
    let inner = match agree(&shared, &label, offer, deadline) {
        Ok(_) => Arc::into_inner(inner).expect("nothing else uses the window"),
        Err(error) => {
            group.unreleased.push(inner);
            return Err(error);
        }
    };
    let memory = inner.segment.without_imports();
    let ended = agree(&shared, &format!("{label}, imports"), Ok(Offer::default()), deadline);
    drop(memory);
    ended.map(drop)
}
