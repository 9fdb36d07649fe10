//! A port of a NIC with its protection domain, completion queue and shared receive queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ibverbs_sys::{ibv_recv_wr, ibv_sge};
use peerlane_toolkit::mapping::Mapping;

use super::streams::{MESSAGE_BYTES, Message};
use crate::device::Place;
use crate::error::Error;
use crate::sys::{Cq, Domain, Mr, Srq};

/// The largest number of ports of one rank.
pub(crate) const CARDS_MAX: usize = 4;

/// A NIC of a fabric.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) place: Place,
    pub(crate) domain: Arc<Domain>,
    /// The completion queue of messages from peers.
    pub(crate) cq: Arc<Cq>,
    pub(crate) srq: Arc<Srq>,
    slots: Slots,
    /// Whether the device has reported that the port is down.
    down: AtomicBool,
    /// The number of free receive buffers below which the device sends an event.
    low: u32,
}

/// The receive buffers of messages.
#[derive(Debug)]
struct Slots {
    mr: Mr,
    memory: Mapping,
}

impl Card {
    /// Opens a NIC with `receives` receive buffers, or as many as the device supports.
    pub(super) fn open(place: Place, receives: u32) -> Result<Self, Error> {
        if place.limits.max_srq == 0 {
            let name = &place.context.name;
            let text = format!("{name} has no shared receive queues, which this backend needs");
            return Err(Error::unavailable(text));
        }
        let domain = Arc::new(Domain::open(Arc::clone(&place.context))?);
        let receives = receives.min(place.limits.max_srq_wr.max(1).cast_unsigned());
        // The queue has room for every place and for as many queue pairs again.
        let receives = receives.min(place.limits.max_cqe.max(2).cast_unsigned() / 2);
        let cq = Arc::new(Cq::create(&place.context, 2 * receives)?);
        let srq = Arc::new(Srq::create(&domain, receives)?);
        let bytes = receives as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::of_mapping)?;
        // SAFETY: the registration is dropped before the mapping, being the field before it.
        let mr = unsafe { domain.register(memory.base(), bytes) }?;
        let low = receives / 2;
        let (slots, down) = (Slots { mr, memory }, AtomicBool::new(false));
        let card = Self { place, domain, cq, srq, slots, down, low };
        for slot in 0..u64::from(receives) {
            card.receive(slot)?;
        }
        card.warn_when_low();
        Ok(card)
    }

    /// Posts a receive buffer.
    pub(super) fn receive(&self, slot: u64) -> Result<(), Error> {
        let addr = self.slots.memory.base().as_ptr() as u64 + slot * MESSAGE_BYTES as u64;
        let mut place =
            ibv_sge { addr, length: MESSAGE_BYTES as u32, lkey: self.slots.mr.local_key() };
        let mut request =
            ibv_recv_wr { wr_id: slot, sg_list: &mut place, num_sge: 1, ..ibv_recv_wr::default() };
        // SAFETY: the slots live as long as the queue.
        unsafe { self.srq.post(&mut request) }
    }

    /// Returns the message in a receive buffer whose completion was taken.
    pub(super) fn message(&self, slot: u64) -> Message {
        let at = slot as usize * MESSAGE_BYTES;
        let from = self.slots.memory.base().as_ptr().wrapping_add(at);
        let mut bytes = [0; MESSAGE_BYTES];
        // SAFETY: the slot was posted by `receive`, so it lies inside; its completion was taken, and
        // the card writes there only once it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), MESSAGE_BYTES) };
        Message::decode(&bytes)
    }

    /// Records whether the device has reported the port down.
    pub(super) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::Relaxed);
    }

    /// Returns the reason why packets may be lost, to be appended to another text.
    pub(crate) fn trouble(&self) -> String {
        let (name, port) = (&self.place.context.name, self.place.port);
        if self.down.load(Ordering::Relaxed) {
            format!("; port {port} of {name} is down")
        } else {
            String::new()
        }
    }

    /// Requests one event when few receive buffers are free.
    ///
    /// Without it, peers of a rank that does not poll wait longer. A device that cannot send the event is therefore not an
    /// error.
    pub(super) fn warn_when_low(&self) {
        let _ = self.srq.warn_below(self.low);
    }
}
