//! Opens and releases windows: each rank registers its region on every fabric, and imports the
//! regions of the ranks that the fabric reaches.

use std::sync::Arc;

use peerlane_hal::wire::checksum;
use peerlane_hal::{Deadline, DynRegion, ErrorKind};

use super::Inner;
use crate::buffer_plan::CallSite;
use crate::element::DType;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree, encode};
use crate::group::runtime::Runtime;
use crate::group::segment::{Segment, exchange};

/// Up to this number, ranks compare call sites one by one. More are compared in as many ranges, so
/// that an error can name the one that differs.
const NAMED_CALL_SITES_MAX: usize = 64;

/// Returns the fields that ranks compare when they open a window, without its length.
pub(in crate::group) fn offer(dtype: DType) -> Offer {
    Offer::default().field("operation", "window").field("dtype", dtype)
}

/// Returns the fields that ranks compare when they open a window for call sites, without its
/// length.
pub(in crate::group) fn offer_for(dtype: DType, call_sites: &[CallSite]) -> Offer {
    let count = call_sites.len();
    let offer = Offer::default().field("operation", "window for call sites").field("dtype", dtype);
    let mut offer = offer.field("call_sites", count);

    // An error then names the call site that differs.
    if count <= NAMED_CALL_SITES_MAX {
        for (index, call_site) in call_sites.iter().enumerate() {
            let CallSite { name, bytes, first_use, last_use } = call_site;
            offer = offer
                .field(&format!("name of call site {index}"), name)
                .field(&format!("bytes of call site {name}"), bytes)
                .field(&format!("first_use of call site {name}"), first_use)
                .field(&format!("last_use of call site {name}"), last_use);
        }
        return offer;
    }

    let len = count.div_ceil(NAMED_CALL_SITES_MAX);
    for (index, range) in call_sites.chunks(len).enumerate() {
        let (first, last) = (index * len, index * len + range.len() - 1);
        let name = format!("the digest of call sites {first} to {last}");
        offer = offer.field(&name, checksum(&encode(&range)));
    }
    offer
}

pub(in crate::group) fn open(
    group: &mut Group,
    given: Option<DynRegion>,
    wanted: Result<(Offer, u64), Error>,
) -> Result<Arc<Inner>, Error> {
    group.runtime.life.check()?;
    // It counts when the ranks have agreed. A rank that refuses the call does not know which count
    // would change.
    let number = group.windows + 1;
    let (fabrics, runtime) = (group.fabrics(), Arc::clone(&group.runtime));
    let name = format!("window {number}");
    let is_allocated = given.is_none();
    let own = wanted.and_then(|(offer, bytes)| {
        let offer = offer.field("window_bytes", bytes);
        let segment = match given {
            Some(region) => Segment::of_data(fabrics, region, "the window"),
            None => Segment::allocate(fabrics, bytes, "the window"),
        };
        Ok((offer, vec![segment?]))
    });
    let deadline = Deadline::after(group.timeout());
    let segments = exchange(&runtime, fabrics, &name, own, deadline)?;
    group.windows = number;
    let segment = segments.into_iter().next().expect("one segment was exchanged");
    let window = Arc::new(Inner { number, segment, users: Arc::clone(&group.users), runtime });

    group.allocated_windows.retain(|window| window.strong_count() > 0);
    if is_allocated {
        group.allocated_windows.push(Arc::downgrade(&window));
    }
    Ok(window)
}

/// A window whose release has failed, and the reason.
pub(in crate::group) type Refused = (Arc<Inner>, Error);

/// Gives the memory of a window back on every rank. If a rank still uses the window, all keep it.
///
/// If the release fails, the group keeps the memory besides the caller, who may drop the window
/// while a peer can still write to it.
pub(in crate::group) fn release(group: &mut Group, inner: Arc<Inner>) -> Result<(), Refused> {
    // The reference that an earlier try has left is not a use of the window.
    group.unreleased.retain(|kept| !Arc::ptr_eq(kept, &inner));

    let is_own = Arc::ptr_eq(&inner.runtime, &group.runtime);
    let released = release_everywhere(group, inner);
    if let Err((inner, _)) = &released
        && is_own
    {
        group.unreleased.push(Arc::clone(inner));
    }
    released
}

/// Releases a window in two agreements.
///
/// After the first one no rank uses the window any more, so each ends its imports. After the second
/// one all have.
fn release_everywhere(group: &mut Group, inner: Arc<Inner>) -> Result<(), Refused> {
    // A call in progress still uses the windows of its operation.
    let ended = group.runtime.life.check().and_then(|()| group.finish_open_call());
    if let Err(ended) = ended {
        return Err((inner, ended));
    }
    let runtime = Arc::clone(&group.runtime);
    let deadline = Deadline::after(group.timeout());
    let label = format!("release window {}", inner.number);

    group.immediate.forget_window(inner.number);
    let offer = check_unused(&runtime, &inner).map(|()| Offer::default());
    if let Err(error) = agree(&runtime, &label, offer, deadline) {
        return Err((inner, error));
    }

    // No rank has a channel over the window any more, so what a dropped channel kept closed is
    // gone.
    group.users.remove_window(inner.number);
    let inner = Arc::into_inner(inner).expect("nothing else uses the window");
    let inner = Arc::new(Inner { segment: inner.segment.without_imports(), ..inner });
    let ended = agree(&runtime, &format!("{label}, imports"), Ok(Offer::default()), deadline);
    ended.map(drop).map_err(|error| (inner, error))
}

/// Refuses a window of another group, and one that an operation or a channel of this rank uses.
fn check_unused(runtime: &Arc<Runtime>, inner: &Arc<Inner>) -> Result<(), Error> {
    if !Arc::ptr_eq(&inner.runtime, runtime) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "the window belongs to another group; release it with that group",
        ));
    }
    if Arc::strong_count(inner) > 1 {
        let text = format!(
            "window {} is still used by an operation or a channel; drop these before the window is released",
            inner.number
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
