//! Puts an engine's thread to sleep on completion channels until a flag may have changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerlane_toolkit::{EventParker, ParkStep};

use crate::connection::SignalReceiver;
use crate::error::Error;
use crate::sys::Cq;

/// The longest sleep while peers may write flags directly, because such a write causes no event.
const DIRECT_WRITES_SLEEP_MAX: Duration = Duration::from_micros(200);

/// Makes one step towards sleep: polls, requests the events of all queues, or sleeps on them.
pub(super) fn park(
    parker: &mut EventParker,
    receiver: &SignalReceiver,
    cqs: &[Arc<Cq>],
    limit: Duration,
) -> Result<(), Error> {
    match parker.step(limit) {
        ParkStep::Woken | ParkStep::Poll => Ok(()),
        ParkStep::Announce => {
            receiver.request_events()?;
            cqs.iter().try_for_each(|cq| cq.request_event())
        }
        ParkStep::Sleep => sleep(parker, receiver, cqs, limit),
    }
}

fn sleep(
    parker: &EventParker,
    receiver: &SignalReceiver,
    cqs: &[Arc<Cq>],
    limit: Duration,
) -> Result<(), Error> {
    let direct_writes = receiver.direct_writes.load(Ordering::SeqCst);
    let limit = if direct_writes { limit.min(DIRECT_WRITES_SLEEP_MAX) } else { limit };

    // The receive queue of each NIC, then the completion queue of each NIC.
    let fds = receiver.nics.iter().map(|nic| nic.cq.fd()).chain(cqs.iter().map(|cq| cq.fd()));
    let ready = parker.sleep(fds, limit)?;
    let (arrivals, completions) = (ready & ((1 << cqs.len()) - 1), ready >> cqs.len());

    let completed = cqs.iter().zip(0_u32..).filter(|(_, at)| completions >> at & 1 == 1);
    completed.for_each(|(cq, _)| cq.drain_events());
    if arrivals != 0 {
        receiver.drain_events();
        // The event was one that another sleeper waits for too, and no further event arrives until
        // it is requested.
        receiver.wake();
    }
    Ok(())
}
