//! A port of a card, with what the fabric has on it: a protection domain, and places for messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ibverbs_sys::{ibv_recv_wr, ibv_sge};
use peerlane_toolkit::mapping::Mapping;

use super::streams::{MESSAGE_BYTES, Message};
use crate::device::Place;
use crate::error::Error;
use crate::sys::{Cq, Domain, Mr, Srq};

/// Most ports over which one rank reaches its peers, inclusive.
pub(crate) const CARDS_MAX: usize = 4;

/// One of a fabric's cards.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) place: Place,
    pub(crate) domain: Arc<Domain>,
    /// What has arrived here from peers.
    pub(crate) cq: Arc<Cq>,
    pub(crate) srq: Arc<Srq>,
    slots: Slots,
    /// The device has said that the port went down.
    down: AtomicBool,
    /// Fewer free places than this are an event, which the fabric's thread hears.
    low: u32,
}

/// Where messages land.
#[derive(Debug)]
struct Slots {
    mr: Mr,
    memory: Mapping,
}

impl Card {
    /// With places for so many messages, or as many as the device has.
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

    /// Posts a place for a message.
    pub(super) fn receive(&self, slot: u64) -> Result<(), Error> {
        let addr = self.slots.memory.base().as_ptr() as u64 + slot * MESSAGE_BYTES as u64;
        let mut place =
            ibv_sge { addr, length: MESSAGE_BYTES as u32, lkey: self.slots.mr.local_key() };
        let mut request =
            ibv_recv_wr { wr_id: slot, sg_list: &mut place, num_sge: 1, ..ibv_recv_wr::default() };
        // SAFETY: the slots live as long as the queue.
        unsafe { self.srq.post(&mut request) }
    }

    /// What has landed in a slot whose completion was taken.
    pub(super) fn message(&self, slot: u64) -> Message {
        let at = slot as usize * MESSAGE_BYTES;
        let from = self.slots.memory.base().as_ptr().wrapping_add(at);
        let mut bytes = [0; MESSAGE_BYTES];
        // SAFETY: the slot was posted by `receive`, so it lies inside; its completion was taken, and
        // the card writes there only once it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), MESSAGE_BYTES) };
        Message::decode(&bytes)
    }

    /// What the device has said of the port.
    pub(super) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::Relaxed);
    }

    /// Why nothing may get through, in words that follow another text.
    pub(crate) fn trouble(&self) -> String {
        let (name, port) = (&self.place.context.name, self.place.port);
        if self.down.load(Ordering::Relaxed) {
            format!("; port {port} of {name} is down")
        } else {
            String::new()
        }
    }

    /// Asks for one event when places get few. Without it a rank that nobody polls lets its peers
    /// wait, and no more: so a device that cannot tell is no error.
    pub(super) fn warn_when_low(&self) {
        let _ = self.srq.warn_below(self.low);
    }
}
